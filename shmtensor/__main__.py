"""`python -m shmtensor`, and the script `shmtensor`: the command line."""


def main() -> None:
    """Run the command line. Ctrl-C while its modules are imported ends it as later on: with 130, and no traceback."""
    try:
        from .cli.main import run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
