"""The entry of `secure-fed` and of `python -m secure_fed`."""

import sys


def main() -> int:
    """Run the command line and return its exit status; an interruption while it is imported ends it in one sentence, too."""
    try:
        from secure_fed.commands import cli
    except KeyboardInterrupt:
        print("secure-fed: interrupted", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
