"""`python -m myelin` is the `myelin` command."""

from myelin.command.main import main

if __name__ == "__main__":
    raise SystemExit(main())
