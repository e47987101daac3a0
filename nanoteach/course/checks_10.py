"""Checks of notebook 10: pieces of text, stop strings, who may come in, and who has left."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nanoteach.async_engine import AsyncEngine, EngineStopped, QueueFull, Stream
from nanoteach.course.checking import Wrong, case, check, expect, expect_equal
from nanoteach.detokenizer import WRONG_BYTE, Detokenizer


class Tokenizer:
    """Tokens that are what their names say, by three habits of real tokenizers.

    b"..." is bytes, as byte-level tokens are; a text that begins with "_" has a space before it,
    but for the first of a text; "<...>" is special and has no text. runs: a run of bytes in which
    one is wrong becomes a replacement character for each of them.
    """

    unk_token_id = None

    def __init__(self, tokens: list[str | bytes], runs: bool = False) -> None:
        self.tokens, self.runs = [*tokens, b"\xff"], runs

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of the wrong byte, where there are tokens for bytes."""
        return len(self.tokens) - 1 if token == WRONG_BYTE and self.runs else None

    def decode(self, token_ids: list[int], **options: Any) -> str:
        """As transformers' does."""
        named = [self.tokens[i] for i in token_ids]
        told = [t for t in named if not (isinstance(t, str) and t.startswith("<"))]
        text, run = "", b""
        for token in [*told, ""]:
            if isinstance(token, bytes):
                run += token
                continue
            text += self.text_of(run) + token.replace("_", " ")
            run = b""
        spaced = told and isinstance(told[0], str) and told[0].startswith("_")
        return text[1:] if spaced else text

    def text_of(self, run: bytes) -> str:
        """A run of bytes as text."""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run) if self.runs else run.decode(errors="replace")


@check("nanoteach.detokenizer.Detokenizer.new_text", "A piece of text, once it is certain", (10,))
def check_new_text(new_text: Callable[..., str | None]) -> None:
    """By hand: what a reader may be shown after each token."""
    smile, euro = "😀".encode(), [bytes([b]) for b in "€".encode()]
    alone = "Decoded alone, a token loses the space before it: decode it behind the context."
    too_much = "That is the context's text as well. Only what comes after it is new."
    half = "Half a character: what comes next will change it. Wait, and return None."
    end = "No more will come (`final`): what is there is written as it is."
    settled = (
        "`is_settled` is asked about the text of the context and the pending tokens together, "
        "not about the piece."
    )
    cases: list[tuple[str, Tokenizer, int, bool, str | None, list[tuple[Any, str]]]] = [
        ("the first word", Tokenizer(["_A"]), 0, False, "A", []),
        ("a word after a word", Tokenizer(["_A", "_fox"]), 1, False, " fox",
         [("fox", alone), ("A fox", too_much)]),
        ("two words at once", Tokenizer(["_A", "_red", "_fox"]), 1, False, " red fox",
         [("red fox", alone), (" fox", "All the pending tokens count, not the last alone."),
          ("A red fox", too_much)]),
        ("half of a smile", Tokenizer(["_A", smile[:2]]), 1, False, None, [("\ufffd", half)]),
        ("all of a smile", Tokenizer(["_A", smile[:2], smile[2:]]), 1, False, "😀",
         [("\ufffd", "All the pending tokens count, not the last alone."),
          (None, "The character is whole now: it may be shown.")]),
        ("half of a smile, and the end", Tokenizer(["_A", smile[:2]]), 1, True, "\ufffd",
         [(None, end), ("", end)]),
        ("a special token", Tokenizer(["_A", "<end>"]), 1, False, None,
         [("", "Nothing was added, so there is no piece yet: return None.")]),
        ("a special token, and the end", Tokenizer(["_A", "<end>"]), 1, True, "", [(None, end)]),
        ("a special token, then a word", Tokenizer(["_A", "<end>", "_fox"]), 1, False, " fox",
         [("fox", alone)]),
        ("the bytes of a euro sign, which a wrong byte may still spoil",
         Tokenizer(["_A", *euro], runs=True), 1, False, None,
         [("€", "A wrong byte next would spoil all of them, and then it would have been shown "
           "for nothing: ask `is_settled`.")]),
        ("the same, and the end", Tokenizer(["_A", *euro], runs=True), 1, True, "€", [(None, end)]),
        ("the same, and a word", Tokenizer(["_A", *euro, "_is"], runs=True), 1, False, "€ is",
         [(None, settled), (" is", "All the pending tokens count, not the last alone.")]),
    ]  # fmt: skip
    for name, tokenizer, num_context, final, right, likely in cases:
        case(name, "`decode` takes a list of tokens, such as `self.context + self.pending`.")
        detokenizer = Detokenizer(tokenizer)
        ids = list(range(len(tokenizer.tokens) - 1))
        detokenizer.context, detokenizer.pending = ids[:num_context], ids[num_context:]
        got = detokenizer.new_text(final)
        if got is None and right is not None:  # None means something here: no `return` is missing
            raise Wrong(name, repr(right), "None: it is to wait", dict(likely).get(None))
        expect_equal(name, right, got, likely)
        left = (detokenizer.context, detokenizer.pending, detokenizer.text)
        if left != (ids[:num_context], ids[num_context:], ""):
            raise Wrong(
                name, "context, pending and text as they were", str(left),
                "`extend` moves the tokens on and writes the text: only say what the piece is.",
            )  # fmt: skip


@check("nanoteach.engine.overlap", "How much of a text must wait for a stop string", (10,))
def check_overlap(overlap: Callable[[str, str], int]) -> None:
    """Every length is tried."""
    for text, stop in (
        ("It stopped.", "END"), ("An ND", "ABEND"), ("NEd.", "END"), ("The E", "END"),
        ("The EN", "END"), ("E is not EN", "END"), ("xaba", "abab"),
        ("aaa", "aaaab"), ("b", "abb"), ("", "END"), ("N", "END"), ("EN", "N"),
        ("one\n", "\n\nUser:"), ("one\n\nUse", "\n\nUser:"),
    ):  # fmt: skip
        lengths = [n for n in range(1, len(stop)) if text.endswith(stop[:n])]
        right = max(lengths, default=0)
        whole = (len(stop), "A whole stop string is found elsewhere: look for its beginnings.")
        likely: list[tuple[Any, str]] = [whole] if text.endswith(stop) else []
        if lengths:
            likely += [
                (min(lengths), "More than that could be its beginning: take the longest."),
                (0, f"{stop[:right]!r} at the end is how {stop!r} begins."),
            ]
        likely += [
            (min(len(text), len(stop) - 1),
             "That many may have to wait, at most. Here fewer can become the stop string."),
            (len(stop) - 1,
             "That many may have to wait, at most. Here fewer can become the stop string."),
            (sum(letter in stop for letter in text), "The end of the text, not letters in it."),
            (next((n for n in range(len(stop) - 1, 0, -1) if stop[:n] in text), 0),
             "Only what stands at the end of the text can go on."),
            (next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[-n:])), 0),
             "The beginning of the stop string, at the end of the text; not its end."),
        ]  # fmt: skip
        expect(f"text {text!r}, stop {stop!r}", overlap, text, stop, to_be=right, likely=likely)


def bridge(max_num_seqs: int = 4, max_queue: int = 3) -> tuple[AsyncEngine, list[str]]:
    """An async engine whose thread does not run, and the list of what was aborted."""
    aborted: list[str] = []
    engine = SimpleNamespace(
        config=SimpleNamespace(max_num_seqs=max_num_seqs),
        requests=dict.fromkeys("abc"),
        abort_request=aborted.append,
    )
    return AsyncEngine(engine, max_queue), aborted  # type: ignore[arg-type]


@check("nanoteach.async_engine.AsyncEngine.admit", "Who may come in", (10,))
def check_admit(admit: Callable[..., None]) -> None:
    """Counted by hand: 4 may run and 3 wait, so 7 may be open."""
    for accepting, there, count, right in (
        (True, 0, 1, None), (True, 6, 1, None), (True, 7, 1, QueueFull), (True, 9, 1, QueueFull),
        (True, 5, 2, None), (True, 5, 3, QueueFull), (True, 0, 7, None), (True, 0, 8, QueueFull),
        (False, 0, 1, EngineStopped), (False, 7, 1, EngineStopped),
    ):  # fmt: skip
        name = f"{there} requests are open and {count} come; 7 may be open"
        name += "" if accepting else "; the server is shutting down"
        case(
            name,
            "Nothing but QueueFull and EngineStopped is to be raised. How many are open: "
            "`len(self.streams)`. How many may be: `self.max_open`.",
        )
        async_engine, _ = bridge()
        async_engine.accepting = accepting
        async_engine.streams = {str(i): Stream([str(i)]) for i in range(there)}
        got: type[Exception] | None = None
        try:
            returned = async_engine.admit(count)  # type: ignore[func-returns-value]
        except (QueueFull, EngineStopped) as error:
            returned, got = None, type(error)
        if returned is not None:
            raise Wrong(name, "an exception, or nothing", repr(returned), "It is to raise.")
        if got is right:
            continue
        hint = "Those that are open and those that come, together, must not be over `max_open`."
        if right is EngineStopped:
            hint = "While `accepting` is False nobody comes in, however much room there is."
        elif right is None and there + count == async_engine.max_open:
            hint = "`max_open` is how many may be open: so many are not over it."
        elif right is QueueFull and there < async_engine.max_open:
            hint = "All of them or none: `count` requests come, and not one."
        expected, came = (e.__name__ if e else "they come in" for e in (right, got))
        raise Wrong(name, expected, came, hint)


@check("nanoteach.async_engine.AsyncEngine.close", "A reader has left", (10,))
def check_close(close: Callable[..., None]) -> None:
    """One stream of two requests is closed, another of one stays."""
    async_engine, aborted = bridge()
    stream, other = Stream(["a", "b"]), Stream(["c"])
    async_engine.streams = {"a": stream, "b": stream, "c": other}

    def carry_out() -> None:
        while not async_engine.commands.empty():
            command = async_engine.commands.get()
            if not callable(command):
                raise Wrong(
                    name, "a function in `commands`", repr(command),
                    "It is called later, without arguments: `partial` makes such a function.",
                )  # fmt: skip
            command()

    name = "a stream of the requests a and b is closed; c is another's"
    case(name, "`stream.request_ids` has its requests; `self.commands.put` takes a function.")
    async_engine.close(stream)
    if aborted:
        raise Wrong(
            name, "nothing aborted on this thread", f"{aborted} aborted",
            "The engine belongs to its own thread: put a function into `commands`.",
        )  # fmt: skip
    expect_equal(
        f"{name}: streams", ["c"], sorted(async_engine.streams),
        [(["a", "b", "c"], "Nobody waits for them any more: take them out of `streams`."),
         (["b", "c"], "A stream may have several requests: `request_ids` is a list."),
         ([], "Another reader still waits for c.")],
    )  # fmt: skip
    case(name)
    carry_out()
    expect_equal(
        f"{name}: aborted", ["a", "b"], sorted(aborted),
        [([], "They would run on to their ends, for nobody, and hold their blocks."),
         (["b", "b"], "The function runs later, when the loop's variable has its last value."),
         (["b"], "A stream may have several requests: `request_ids` is a list."),
         (["a"], "A stream may have several requests: `request_ids` is a list."),
         (["a", "b", "c"], "Another reader still waits for c.")],
    )  # fmt: skip
    name = "the same stream is closed once more, when another request is called a"
    case(name, "Closing twice does no harm.")
    newer = Stream(["a"])
    async_engine.streams["a"] = newer
    aborted.clear()
    async_engine.close(stream)
    carry_out()
    hint = "`streams` says whose request a is now: only a stream's own may end."
    expect_equal(f"{name}: streams", ["a", "c"], sorted(async_engine.streams), hint)
    expect_equal(f"{name}: aborted", [], aborted, hint)
