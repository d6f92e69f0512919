"""``cuflash``, or ``python -m cuflash``: a demo, what there is here, what would run, filling the cache, a self-test."""

import sys


def main() -> int:
    """Run the command of the command line; an interruption while modules load ends it as any other does."""
    try:
        from cuflash.cli.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
