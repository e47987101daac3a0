"""Notebook 10, answered. `python solutions/10_serving.py` checks all of it."""

from functools import partial

from nanoteach.async_engine import EngineStopped, QueueFull
from nanoteach.course import exercise

# A token's text depends on those before it, so it is decoded behind some of them, and what these
# had already is cut off. It is shown when nothing that may follow can change it. Common wrong
# turns: a token decoded alone, which loses its space; half a character shown; an end that is waited
# for, though `final` says that nothing comes.


@exercise("nanoteach.detokenizer.Detokenizer.new_text")
def new_text(self, final: bool):
    """What the pending tokens add, or None while that may change."""
    known = len(self.decode(self.context))
    text = self.decode([*self.context, *self.pending])
    if not final and (len(text) == known or not self.is_settled(text)):
        return None
    return text[known:]


# What could become the stop string is a beginning of it that stands at the text's end. The longest
# such is held back. Common wrong turns: always len(stop) - 1 characters, so that a reader is never
# up to date; the shortest beginning, which lets the rest of a longer one out.


@exercise("nanoteach.engine.overlap")
def overlap(text: str, stop: str) -> int:
    """How many characters at the end may be the stop string's first ones."""
    lengths = [n for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


# Everybody who is open counts, running or waiting. Common wrong turns: refused one too early or one
# too late; a request for several prompts counted as one; a server that lets people in while it
# shuts down.


@exercise("nanoteach.async_engine.AsyncEngine.admit")
def admit(self, count: int) -> None:
    """Whether `count` more requests may come in."""
    if not self.accepting:
        raise EngineStopped("no more requests are taken")
    room = self.max_open - len(self.streams)
    if count > room:
        raise QueueFull(f"there is room for {max(0, room)} requests: try again later")


# Two things end: the waiting on this side and the computing on the other. The second is a command,
# since another thread owns the engine. Common wrong turns: `streams` forgotten, which leaves the
# place taken; the command forgotten, which leaves the blocks taken; the engine called from here,
# in the middle of its step; a lambda in a loop, which sees only the loop's last value.


@exercise("nanoteach.async_engine.AsyncEngine.close")
def close(self, stream) -> None:
    """Forget a stream's requests, and abort what still runs of them."""
    for request_id in stream.request_ids:
        if self.streams.get(request_id) is stream:
            self.streams.pop(request_id)
            self.commands.put(partial(self._abort, request_id))
