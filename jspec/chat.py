"""Chats with a model in the terminal: `python -m jspec.chat`; /help lists what may be typed.

Answers go to standard output, everything else to standard error. In a pipe each line is a message.
"""

from absl import flags
from jax.sharding import Mesh

from jspec.cli import answer_flags, mesh_flags
from jspec.cli import program as cli
from jspec.cli.answer_flags import load_models, read_method, read_settings
from jspec.cli.chat_session import Session
from jspec.cli.program import list_flags
from jspec.cli.terminal import Terminal
from jspec.common.errors import InputError
from jspec.common.json_lines import check_unicode
from jspec.weights.resolver import check_decoder

flags.adopt_module_key_flags(answer_flags)  # so that --help lists them
flags.adopt_module_key_flags(mesh_flags)
flags.FLAGS.set_default("max_new_tokens", 1024)
_SYSTEM = flags.DEFINE_string("system", None, "The system message of the chat template.")
_MAX_SEQ_LEN = flags.DEFINE_integer(
    "max_seq_len", None, "Most tokens of the whole conversation. Default: the model's context."
)
_STOP = flags.DEFINE_multi_string("stop", [], "A text that ends an answer. Several may be given.")
_STATS = flags.DEFINE_bool("stats", True, "Print device, memory and statistics on standard error.")
list_flags("Prompts", "system max_new_tokens stop")
list_flags("Output", "stats")


def main() -> None:
    """Reads the flags, loads the models, answers messages."""
    settings = read_settings(stop=tuple(_STOP.value))
    for name, usual in (("num_beams", 1), ("logprobs", False)):
        if getattr(settings, name) != usual:
            raise InputError(f"expected no --{name} in a chat, which does not read it")
    if given := mesh_flags.given_of_processes():
        raise InputError(f"expected a chat in one process, got --{given[0]}")
    with mesh_flags.flagged_mesh() as mesh:
        chat(mesh)


def chat(mesh: Mesh | None) -> None:
    """Answers messages on the devices of a mesh, or on the default device, until the input ends."""
    settings = read_settings(stop=tuple(_STOP.value))
    method, terminal, system = read_method(settings), Terminal(), _SYSTEM.value
    system = None if system is None else check_unicode(system, "--system")
    models = load_models(mesh)
    check_decoder(models[0], "in a chat")
    session = Session(
        models, method, settings, terminal,
        system=system, max_seq_len=_MAX_SEQ_LEN.value, has_stats=_STATS.value,
    )  # fmt: skip
    if terminal.is_interactive:
        terminal.say("Type a message, or /help. Ctrl-D ends.")
    is_going, num_refused = True, 0
    while is_going:
        try:
            message = terminal.read_message()
            is_going = message is not None and session.take(message)
        except InputError as error:
            num_refused += 1
            where = "" if terminal.is_interactive else f"line {terminal.num_lines}: "
            terminal.say(f"error: {where}{error}")
    if num_refused and not terminal.is_interactive:  # a script is to know
        raise InputError(
            f"expected messages and commands, {num_refused} of the lines got no answer"
        )


if __name__ == "__main__":
    cli.run_main(main)
