"""`python -m shmtensor`: the command line."""

from .cli.main import app

if __name__ == "__main__":
    app(prog_name="shmtensor")
