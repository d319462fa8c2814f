"""``python -m kvstore`` is the ``kvstore`` command."""

from kvstore.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
