"""Second and wrong answers to the exercises of notebook 04; see course_cases.py."""

from course_cases import second, wrong

PACK = "nanoteach.model_runner.pack"


@second(PACK)
def token_by_token(scheduled):
    tokens, positions, ends, last = [], [], [0], []
    for seq, num_new in scheduled:
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_new):
            tokens.append(seq.token_ids[position])
            positions.append(position)
            if position == len(seq.token_ids) - 1:
                last.append(len(tokens) - 1)
        ends.append(len(tokens))
    return PackedBatch(tokens, positions, ends, last)


@wrong(PACK, "not in the packed batch")
def positions_count_on(scheduled):
    ids = []
    ends = [0]
    for seq, n in scheduled:
        ids += seq.token_ids[seq.num_computed_tokens : seq.num_computed_tokens + n]
        ends.append(len(ids))
    last = [e - 1 for p, e in zip(scheduled, ends[1:], strict=True) if p.gives_token]
    return PackedBatch(ids, list(range(len(ids))), ends, last)


@wrong(PACK, "begin at num_computed_tokens")
def positions_from_zero(scheduled):
    ids, positions, ends = [], [], [0]
    for seq, n in scheduled:
        ids += seq.token_ids[seq.num_computed_tokens : seq.num_computed_tokens + n]
        positions += range(n)
        ends.append(len(ids))
    last = [e - 1 for p, e in zip(scheduled, ends[1:], strict=True) if p.gives_token]
    return PackedBatch(ids, positions, ends, last)


@wrong(PACK, "It begins with 0")
def no_leading_zero(scheduled):
    ids, positions, ends = [], [], []
    for seq, n in scheduled:
        start = seq.num_computed_tokens
        ids += seq.token_ids[start : start + n]
        positions += range(start, start + n)
        ends.append(len(ids))
    last = [e - 1 for p, e in zip(scheduled, ends, strict=True) if p.gives_token]
    return PackedBatch(ids, positions, ends, last)


@wrong(PACK, "Add them up")
def lengths_not_added(scheduled):
    ids, positions, sizes = [], [], []
    for seq, n in scheduled:
        start = seq.num_computed_tokens
        ids += seq.token_ids[start : start + n]
        positions += range(start, start + n)
        sizes.append(n)
    return PackedBatch(ids, positions, sizes, [])


@wrong(PACK, "add up num_new")
def whole_histories(scheduled):
    ids, positions, ends, last = [], [], [0], []
    for seq, n in scheduled:
        start = seq.num_computed_tokens
        ids += seq.token_ids[start : start + n]
        positions += range(start, start + n)
        ends.append(ends[-1] + start + n)
        last.append(len(ids) - 1)
    return PackedBatch(ids, positions, ends, last)


@wrong(PACK, "samples nothing: see gives_token")
def everybody_samples(scheduled):
    ids, positions, ends = [], [], [0]
    for seq, n in scheduled:
        start = seq.num_computed_tokens
        ids += seq.token_ids[start : start + n]
        positions += range(start, start + n)
        ends.append(len(ids))
    return PackedBatch(ids, positions, ends, [e - 1 for e in ends[1:]])


@wrong(PACK, "one before its end")
def one_too_far(scheduled):
    ids, positions, ends, last = [], [], [0], []
    for part in scheduled:
        seq, n = part
        start = seq.num_computed_tokens
        ids += seq.token_ids[start : start + n]
        positions += range(start, start + n)
        ends.append(len(ids))
        if part.gives_token:
            last.append(len(ids))
    return PackedBatch(ids, positions, ends, last)


@wrong(PACK, "the next num_new tokens, not the last ones")
def last_tokens(scheduled):
    ids, positions, ends, last = [], [], [0], []
    for part in scheduled:
        ids += part.seq.token_ids[-part.num_new :]
        start = part.seq.num_computed_tokens
        positions += range(start, start + part.num_new)
        ends.append(len(ids))
        if part.gives_token:
            last.append(len(ids) - 1)
    return PackedBatch(ids, positions, ends, last)


@wrong(PACK, "Only num_new of them")
def all_that_is_missing(scheduled):
    ids, positions, ends, last = [], [], [0], []
    for part in scheduled:
        start = part.seq.num_computed_tokens
        ids += part.seq.token_ids[start:]
        positions += range(start, len(part.seq.token_ids))
        ends.append(len(ids))
        if part.gives_token:
            last.append(len(ids) - 1)
    return PackedBatch(ids, positions, ends, last)


@wrong(PACK, "Change no request")
def counts_what_is_to_come(scheduled):
    batch = PackedBatch([], [], [0], [])
    for part in scheduled:
        seq, stop = part.seq, part.seq.num_computed_tokens + part.num_new
        if part.gives_token:
            batch.logit_indices.append(len(batch.input_ids) + part.num_new - 1)
        batch.input_ids.extend(seq.token_ids[seq.num_computed_tokens : stop])
        batch.positions.extend(range(seq.num_computed_tokens, stop))
        batch.cu_seqlens.append(len(batch.input_ids))
        seq.num_computed_tokens = stop
    return batch


ADMIT = "nanoteach.scheduler.Scheduler.admit"


@second(ADMIT)
def slot_by_slot(self, budget):
    come_in = []
    for _ in range(self.max_num_seqs - len(self.running)):
        if not self.waiting:
            break
        seq = self.waiting.popleft()
        found = seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        if self.trace and found:
            self.trace.add("hit", seq.request_id, seq.block_table[:])
        num_new = self.chunk(len(seq.token_ids) - found, budget)
        if not num_new or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            self.waiting.appendleft(seq)
            break
        seq.status = Status.RUNNING
        self.running.append(seq)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = found
        self.num_prefix_queries += len(seq.token_ids)
        self.num_prefix_hits += found
        self.publish_prompt(seq, num_new)
        come_in.append(Scheduled(seq, num_new))
        budget = budget - num_new
    return come_in


@wrong(ADMIT, "makes the budget smaller")
def budget_stays(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
    return scheduled


@wrong(ADMIT, "Nobody overtakes")
def overtaking(self, budget):
    scheduled = []
    for seq in list(self.waiting):
        if len(self.running) == self.max_num_seqs:
            break
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            continue
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.status = Status.RUNNING
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "those who were there before among them")
def slots_of_this_step(self, budget):
    scheduled = []
    while self.waiting and len(scheduled) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "ask what allocate returned")
def takes_blocks_for_granted(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0:
            self.release(seq)
            break
        self.block_manager.allocate(seq, len(seq.token_ids))
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "prompt and outputs")
def blocks_of_the_prompt(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, seq.num_prompt_tokens):
            self.release(seq)
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "Match the prefix first")
def counts_first(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        num_new = self.chunk(len(seq.token_ids), budget)
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "must be released")
def leaves_blocks_with_who_waits(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "gets the status Status.RUNNING")
def still_waiting(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.running.append(self.waiting.popleft())
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "not a bare tuple")
def bare_tuples(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.num_cached_tokens = seq.num_cached_tokens or seq.num_computed_tokens
        self.num_prefix_queries += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed_tokens
        self.publish_prompt(seq, num_new)
        scheduled.append((seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "popleft() takes the first")
def from_the_wrong_end(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.waiting.pop()
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.num_cached_tokens = seq.num_cached_tokens or seq.num_computed_tokens
        self.num_prefix_queries += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed_tokens
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "keep its answer in num_computed_tokens")
def match_not_kept(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.num_cached_tokens = seq.num_cached_tokens or seq.num_computed_tokens
        self.num_prefix_queries += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed_tokens
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "no list in its place")
def a_new_list(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.waiting = [s for s in self.waiting if s is not seq]
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.num_cached_tokens = seq.num_cached_tokens or seq.num_computed_tokens
        self.num_prefix_queries += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed_tokens
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "Copy in the bookkeeping")
def no_bookkeeping(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


@wrong(ADMIT, "Copy in the bookkeeping")
def cached_tokens_unset(self, budget):
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        num_new = self.chunk(seq.num_missing_tokens, budget)
        if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
            self.release(seq)
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        self.num_prefix_queries += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed_tokens
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


RETIRE = "nanoteach.scheduler.Scheduler.retire"


@second(RETIRE)
def looks_in_both(self, seq, reason):
    for queue in (self.waiting, self.running):
        if seq in queue:
            queue.remove(seq)
    seq.status, seq.finish_reason = Status.FINISHED, reason
    self.block_manager.free(seq)
    seq.num_computed_tokens = 0
    if self.trace is not None:
        self.trace.add("finished", seq.request_id, reason)


@wrong(RETIRE, "aborted before it ever ran")
def running_only(self, seq, reason):
    self.running.remove(seq)
    self.release(seq)
    seq.status = Status.FINISHED
    seq.finish_reason = reason
    if self.trace:
        self.trace.add("finished", seq.request_id, reason)


@wrong(RETIRE, "Did the status change before you looked at it")
def status_too_early(self, seq, reason):
    seq.status = Status.FINISHED
    seq.finish_reason = reason
    (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
    self.release(seq)
    if self.trace:
        self.trace.add("finished", seq.request_id, reason)


@wrong(RETIRE, "Its blocks must be free at once")
def keeps_its_blocks(self, seq, reason):
    (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
    seq.status = Status.FINISHED
    seq.finish_reason = reason
    if self.trace:
        self.trace.add("finished", seq.request_id, reason)


@wrong(RETIRE, "self.release does both")
def blocks_alone(self, seq, reason):
    (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
    self.block_manager.free(seq)
    seq.status = Status.FINISHED
    seq.finish_reason = reason
    if self.trace:
        self.trace.add("finished", seq.request_id, reason)


@wrong(RETIRE, "keep the reason")
def forgets_why(self, seq, reason):
    (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
    self.release(seq)
    seq.status = Status.FINISHED
    if self.trace:
        self.trace.add("finished", seq.request_id, reason)


@wrong(RETIRE, "A request that waits can be over too")
def skips_who_waits(self, seq, reason):
    if seq in self.running:
        self.running.remove(seq)
    self.release(seq)
    seq.status = Status.FINISHED
    seq.finish_reason = reason
    if self.trace:
        self.trace.add("finished", seq.request_id, reason)


@wrong(RETIRE, "no list in its place")
def a_new_queue(self, seq, reason):
    if seq.status is Status.RUNNING:
        self.running.remove(seq)
    self.waiting = [other for other in self.waiting if other is not seq]
    self.release(seq)
    seq.status = Status.FINISHED
    seq.finish_reason = reason
    if self.trace:
        self.trace.add("finished", seq.request_id, reason)


VICTIM = "nanoteach.scheduler.Scheduler.choose_victim"


@second(VICTIM)
def unpack_the_last(self):
    *_, newest = self.running
    return newest


@wrong(VICTIM, "the first that was let in")
def oldest(self):
    return self.running[0]


@wrong(VICTIM, "Equal arrival times say nothing")
def latest_arrival(self):
    return max(self.running, key=lambda seq: seq.arrival_time)


@wrong(VICTIM, "Not the one that frees most")
def most_blocks(self):
    return max(self.running, key=lambda seq: len(seq.block_table))


@wrong(VICTIM, "choose among self.running")
def from_the_queue(self):
    return self.waiting[-1] if self.waiting else self.running[-1]


@wrong(VICTIM, "Only choose")
def takes_it_out(self):
    return self.running.pop()
