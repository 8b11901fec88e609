"""The command line: `regard generate`, `chat`, `fill`, `classify`, `detect`, `list`, `explain`, `plan` and `check`.

A user's mistake is one line on stderr and exit code 2; anything else that goes wrong is a bug and shows its traceback.
`check` ends with 1 where a promise is broken.
torch is imported by the commands that compute, so `regard --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on these arguments (those of the process by default) and return its exit code."""
    try:
        from regard.cli.commands import command
    except ModuleNotFoundError as missing:
        if missing.name not in {"typer", "rich"}:
            raise
        return _complain(f"the command line needs the package {missing.name}: pip install 'regard[cli]'")
    try:
        result = command().main(args=arguments, prog_name="regard", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (line := _mistake(error)) is None:
            raise
        return _complain(line)


def _mistake(error: Exception) -> str | None:
    """What to tell a user whose input caused this error, or None where the error is ours."""
    from regard.errors import RegardError

    if hasattr(error, "format_message"):  # an unknown option, a missing argument: the parser's own errors
        return f"{error.format_message().rstrip('.')}. Try `regard --help`."
    if isinstance(error, ModuleNotFoundError) and "pip install" in str(error):  # it names the extra itself
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] != "regard":
        return f"this needs the package {error.name}: pip install 'regard[cli]'"
    if isinstance(error, RegardError | ValueError | TypeError | OSError):
        return str(error)
    return None


def _complain(line: str) -> int:
    print("regard:", " ".join(line.split()), file=sys.stderr)
    return 2
