"""Notebook 10: other right answers, and plausible wrong ones."""

from course_cases import second, wrong

from nanoteach.async_engine import EngineStopped, QueueFull

PIECE = "nanoteach.detokenizer.Detokenizer.new_text"


@second(PIECE)
def by_prefix(self, final):
    old, new = self.decode(self.context), self.decode(self.context + self.pending)
    piece = new.removeprefix(old)
    ready = final or (piece and self.is_settled(new))
    return piece if ready else None


@wrong(PIECE, "loses the space before it")
def decodes_alone(self, final):
    text = self.decode(self.pending)
    return text if final or (text and "\ufffd" not in text) else None


@wrong(PIECE, "Only what comes after it is new")
def says_all(self, final):
    text = self.decode(self.context + self.pending)
    return text if final or self.is_settled(text) else None


@wrong(PIECE, "Half a character")
def shows_halves(self, final):
    before = self.decode(self.context)
    piece = self.decode(self.context + self.pending)[len(before) :]
    return piece if final or piece else None


@wrong(PIECE, "No more will come")
def never_ends(self, final):
    before, after = self.decode(self.context), self.decode(self.context + self.pending)
    return after[len(before) :] if len(after) > len(before) and self.is_settled(after) else None


@wrong(PIECE, "no piece yet")
def shows_nothing(self, final):
    before, after = self.decode(self.context), self.decode(self.context + self.pending)
    return after[len(before) :] if final or self.is_settled(after) else None


@wrong(PIECE, "would spoil all of them")
def trusts_whole_characters(self, final):
    before, after = self.decode(self.context), self.decode(self.context + self.pending)
    piece = after[len(before) :]
    return piece if final or (piece and not piece.endswith("\ufffd")) else None


@wrong(PIECE, "not the last alone")
def takes_the_last(self, final):
    before = self.decode(self.context)
    after = self.decode(self.context + self.pending[-1:])
    return after[len(before) :] if final or (len(after) > len(before)) else None


@wrong(PIECE, "together, not about the piece")
def asks_about_the_piece(self, final):
    before, after = self.decode(self.context), self.decode(self.context + self.pending)
    piece = after[len(before) :]
    return piece if final or (piece and self.is_settled(piece)) else None


@wrong(PIECE, "only say what the piece is")
def moves_on(self, final):
    before, after = self.decode(self.context), self.decode(self.context + self.pending)
    if final or (len(after) > len(before) and self.is_settled(after)):
        self.context, self.pending = self.pending, []
        return after[len(before) :]
    return None


OVERLAP = "nanoteach.engine.overlap"


@second(OVERLAP)
def length_by_length(text, stop):
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@second(OVERLAP)
def letter_by_letter(text, stop):
    n = min(len(text), len(stop) - 1)
    while n and text[len(text) - n :] != stop[:n]:
        n -= 1
    return n


@wrong(OVERLAP, "at most. Here fewer")
def always_as_many(text, stop):
    return min(len(text), len(stop) - 1)


@wrong(OVERLAP, "take the longest")
def the_shortest(text, stop):
    return next((n for n in range(1, len(stop)) if text.endswith(stop[:n])), 0)


@wrong(OVERLAP, "Only what stands at the end")
def anywhere(text, stop):
    return next((n for n in range(len(stop) - 1, 0, -1) if stop[:n] in text), 0)


@wrong(OVERLAP, "found elsewhere")
def the_whole_of_it(text, stop):
    return next((n for n in range(len(stop), 0, -1) if text.endswith(stop[:n])), 0)


@wrong(OVERLAP, "is how")
def first_letter_alone(text, stop):
    return int(len(stop) > 1 and len(text) == 0)


@wrong(OVERLAP, "not its end")
def from_the_wrong_side(text, stop):
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[-n:])), 0)


ADMIT = "nanoteach.async_engine.AsyncEngine.admit"


@second(ADMIT)
def by_sum(self, count):
    if self.accepting and len(self.streams) + count <= self.max_open:
        return
    raise QueueFull("full") if self.accepting else EngineStopped("closed")


@wrong(ADMIT, "so many are not over it")
def one_too_early(self, count):
    if not self.accepting:
        raise EngineStopped("closed")
    if len(self.streams) + count >= self.max_open:
        raise QueueFull("full")


@wrong(ADMIT, "All of them or none")
def counts_one(self, count):
    if not self.accepting:
        raise EngineStopped("closed")
    if len(self.streams) >= self.max_open:
        raise QueueFull("full")


@wrong(ADMIT, "nobody comes in")
def lets_people_in_at_the_end(self, count):
    if len(self.streams) + count > self.max_open:
        raise QueueFull("full")


@wrong(ADMIT, "together, must not be over")
def looks_at_the_newcomers(self, count):
    if not self.accepting:
        raise EngineStopped("closed")
    if count > self.max_open:
        raise QueueFull("full")


@wrong(ADMIT, "It is to raise")
def answers(self, count):
    return self.accepting and len(self.streams) + count <= self.max_open


CLOSE = "nanoteach.async_engine.AsyncEngine.close"


@second(CLOSE)
def with_a_default(self, stream):
    mine = [i for i, owner in self.streams.items() if owner is stream]
    for request_id in mine:
        del self.streams[request_id]
        self.commands.put(lambda name=request_id: self.engine.abort_request(name))


@second(CLOSE)
def with_one_command(self, stream):
    mine = [name for name in stream.request_ids if self.streams.get(name) is stream]

    def abort():
        for name in mine:
            self._abort(name)

    for name in mine:
        del self.streams[name]
    self.commands.put(abort)


@wrong(CLOSE, "without arguments")
def no_function(self, stream):
    for request_id in stream.request_ids:
        if self.streams.pop(request_id, None):
            self.commands.put((self._abort, request_id))


@wrong(CLOSE, "take them out of")
def only_aborts(self, stream):
    for request_id in stream.request_ids:
        self.commands.put(lambda name=request_id: self._abort(name))


@wrong(CLOSE, "for nobody, and hold their blocks")
def only_forgets(self, stream):
    for request_id in stream.request_ids:
        self.streams.pop(request_id, None)


@wrong(CLOSE, "belongs to its own thread")
def aborts_from_here(self, stream):
    for request_id in stream.request_ids:
        if self.streams.pop(request_id, None):
            self._abort(request_id)


@wrong(CLOSE, "last value")
def late_binding(self, stream):
    for request_id in stream.request_ids:
        if self.streams.pop(request_id, None):
            self.commands.put(lambda: self._abort(request_id))  # noqa: B023


@wrong(CLOSE, "`request_ids` is a list")
def the_first_alone(self, stream):
    request_id = stream.request_ids[0]
    if self.streams.pop(request_id, None):
        self.commands.put(lambda: self._abort(request_id))


@wrong(CLOSE, "whose request a is now")
def by_name_alone(self, stream):
    for request_id in stream.request_ids:
        if self.streams.pop(request_id, None):
            self.commands.put(lambda name=request_id: self._abort(name))
