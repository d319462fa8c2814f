"""``python -m bench.ssd`` runs ``bench.ssd.suite``."""

from bench.ssd.suite import main

if __name__ == "__main__":
    main()
