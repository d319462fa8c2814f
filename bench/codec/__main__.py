"""``python -m bench.codec`` runs ``bench.codec.suite``."""

from bench.codec.suite import main

if __name__ == "__main__":
    main()
