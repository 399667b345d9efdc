"""`ratoon`: the verbs, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ratoon.cli import (
    bench,
    config,
    data,
    doctor,
    drafter,
    explain,
    models,
    pretrain,
    quickstart,
    report,
    rl,
    sft,
    simulate,
    verify,
)
from ratoon.cli import eval as evaluation
from ratoon.errors import RatoonError
from ratoon.stopping import Stopped

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}
INTERRUPTED = 130


class Boundary(TyperGroup):
    """Turns errors that are meant for people into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except RatoonError as error:
            _say(str(error))
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            _say(f"{error.strerror}: {error.filename or 'the disk'}; nothing more was written")
            raise typer.Exit(2) from None
        except Stopped as stopped:
            _say(str(stopped), kind="note")
            raise typer.Exit(stopped.exit_code) from None
        except KeyboardInterrupt as error:
            _say(
                "interrupted; `rl`, `sft`, `pretrain` and `quickstart` go on with --resume, `eval` "
                "when it is called again",
                kind="note",
            )
            raise typer.Exit(getattr(error, "exit_code", INTERRUPTED)) from None


def _say(text: str, kind: str = "error") -> None:
    if _debug and kind == "error":
        traceback.print_exc()
    style = "bold red" if kind == "error" else "bold yellow"
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[{style}]{kind}:[/] ", end="")
    console.print(text, markup=False)


_debug = False
app = typer.Typer(
    cls=Boundary,
    name="ratoon",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning of language models that never waits: rollouts guess ahead "
    "without changing a token, and idle workers train the drafter that does the guessing.",
)


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; can stand anywhere.")
    ] = False,
) -> None:
    """Take the options that stand before a verb."""
    global _debug
    _debug = debug


app.command("quickstart")(quickstart.quickstart)
app.command("rl")(rl.rl)
app.command("sft")(sft.sft)
app.command("pretrain")(pretrain.pretrain)
app.command("eval")(evaluation.evaluate)
app.command("simulate")(simulate.simulate)
app.command("report")(report.report)
app.command("explain")(explain.explain)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
app.add_typer(data.app, name="data")
app.add_typer(drafter.app, name="drafter")
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")


def main() -> None:
    """Entry point of the command `ratoon`."""
    arguments = sys.argv[1:]
    if "--debug" in arguments:
        arguments = ["--debug", *(word for word in arguments if word != "--debug")]
    app(args=arguments)


if __name__ == "__main__":
    main()
