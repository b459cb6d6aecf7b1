"""The command group: what every command shares, how it answers, how an error reaches the user."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
from contextlib import suppress

import click

from archsearch import __version__
from archsearch.cli.options import Command, as_json
from archsearch.errors import ArchsearchError, missing_extra
from archsearch.records import encoded

ORDER = (
    "doctor profile engine search estimate traffic bench-serve acceptance train confirm schedule"
    " export recipe report compare dashboard worker list demo"
).split()


class Group(click.Group):
    """Turns what the user can mend into one line and an exit status; a bug keeps its traceback."""

    command_class = Command

    def list_commands(self, context: click.Context) -> list[str]:
        """In the order in which they are used."""
        known = super().list_commands(context)
        return sorted(
            known, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)
        )

    def invoke(self, context: click.Context) -> object:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
        try:
            return super().invoke(context)
        except ArchsearchError as error:
            words, code = one_line(str(error)), error.exit_code
        except click.UsageError as error:  # click prints three lines of usage around it
            if isinstance(error, click.exceptions.NoArgsIsHelpError):
                raise
            where = error.ctx.command_path if error.ctx else "archsearch"
            words = f"{one_line(error.format_message())} (see {where} --help)"
            code = error.exit_code
        except ModuleNotFoundError as error:
            words, code = missing_extra(error) or "", 2
            if not words:
                raise
        except OSError as error:
            if error.errno == errno.EPIPE:  # click ends quietly where nobody reads on
                raise
            where = f" ({error.filename})" if error.filename else ""
            unwritable = error.errno in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT)
            advice = "; free space or choose a folder you can write to" if unwritable else ""
            words = one_line(f"{error.strerror or error}{where}{advice}")
            words, code = f"{words}. What was finished is kept.", 2
        except KeyboardInterrupt as error:  # which says so where the same command does not go on
            words = str(error) or "stopped. What was finished is kept; run the same command again"
            click.echo(f"\n{words[0].upper()}{words[1:]}.", err=True)
            context.exit(130)
        click.echo(f"Error: {words}", err=True)
        context.exit(code)


def emit(answer: object, text: str = "") -> None:
    """The human text ("": that of the record itself) or, with --json, a record (or a dict) as an
    object alone on the last line."""
    click.echo(json.dumps(encoded(answer)) if as_json() else text or str(answer))


def one_line(text: str) -> str:
    """`text` on one line; a word of more than 200 characters (a value, a file's name) is cut."""
    return " ".join(word if len(word) <= 200 else f"{word[:80]}..." for word in text.split())


@click.group(
    cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="archsearch")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens inside.")
def main(verbose: bool) -> None:
    """Find the draft model that makes your target fastest under speculative decoding, on your
    device.

    \b
    archsearch profile --gpu cpu --target smollm2-135m      measure this device
    archsearch search --target smollm2-135m --gpu cpu       score thousands of drafts, rank them
    archsearch search ... --confirm 1                 and train finalists, run the best in an engine
    archsearch estimate --target llama-65b --draft wide-796m --draft sheared-llama-1.3b --gpu a100
    archsearch list targets

    Guides: README.md and docs/.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR,
        format="%(name)s: %(message)s" if verbose else "%(levelname)s: %(message)s",
        stream=sys.stderr,
    )
    # What libraries warn of is theirs; archsearch's own warnings are for whoever reads the answer.
    logging.getLogger("archsearch").setLevel(logging.INFO if verbose else logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
