"""``python -m bench.simulate`` runs ``bench.simulate.suite``."""

from bench.simulate.suite import main

if __name__ == "__main__":
    main()
