"""Second and wrong answers to the exercises of notebook 06; see course_cases.py."""

from course_cases import second, wrong

CHUNK = "nanoteach.chunked_prefill.ChunkedPrefillScheduler.chunk"


@second(CHUNK)
def by_comparison(self, num_missing, budget):
    if num_missing > budget:
        return budget
    return num_missing


@wrong(CHUNK, "stage 4's rule, all or nothing")
def all_or_nothing(self, num_missing, budget):
    return num_missing if num_missing <= budget else 0


@wrong(CHUNK, "more tokens than it is missing")
def whole_budget(self, num_missing, budget):
    return budget


@wrong(CHUNK, "more tokens than the budget has")
def no_limit(self, num_missing, budget):
    return num_missing


@wrong(CHUNK, "what is left of this step")
def the_step_s_budget(self, num_missing, budget):
    return min(num_missing, self.max_num_batched_tokens)


@wrong(CHUNK, "need not fill whole blocks")
def whole_blocks(self, num_missing, budget):
    size = self.block_manager.block_size
    return num_missing if num_missing <= budget else budget // size * size


@wrong(CHUNK, "give an int, not a float")
def a_float(self, num_missing, budget):
    return min(num_missing, budget) / 1


SPLIT = "nanoteach.chunked_prefill.split_budget"


@second(SPLIT)
def sorted_once(missing, budget):
    grants = [0] * len(missing)
    for i in sorted(range(len(missing)), key=lambda i: missing[i] != 1):  # stable: oldest first
        grants[i] = min(missing[i], budget)
        budget -= grants[i]
    return grants


@wrong(SPLIT, "A prompt takes a token that a decode needs")
def oldest_first(missing, budget):
    grants = []
    for num_missing in missing:
        grants.append(min(num_missing, budget))
        budget -= grants[-1]
    return grants


@wrong(SPLIT, "a decode's token counts as well")
def decodes_for_free(missing, budget):
    grants = []
    for num_missing in missing:
        if num_missing == 1:
            grants.append(1)
        else:
            grants.append(min(num_missing, budget))
            budget -= grants[-1]
    return grants


@wrong(SPLIT, "went below zero")
def below_zero(missing, budget):
    left_for_prompts = budget - missing.count(1)
    left_for_decodes = budget
    grants = []
    for num_missing in missing:
        if num_missing == 1:
            grants.append(min(1, left_for_decodes))
            left_for_decodes -= grants[-1]
        else:
            grants.append(min(num_missing, left_for_prompts))
            left_for_prompts -= grants[-1]
    return grants


@wrong(SPLIT, "may get a part")
def whole_prompts(missing, budget):
    grants = [0] * len(missing)
    for decodes in (True, False):
        for i, num_missing in enumerate(missing):
            if (num_missing == 1) is decodes and num_missing <= budget:
                grants[i] = num_missing
                budget -= num_missing
    return grants


@wrong(SPLIT, "The older prompt comes first")
def even_shares(missing, budget):
    grants = [0] * len(missing)
    for i, num_missing in enumerate(missing):
        if num_missing == 1 and budget:
            grants[i], budget = 1, budget - 1
    while budget and any(m > 1 and g < m for m, g in zip(missing, grants, strict=True)):
        for i, num_missing in enumerate(missing):
            if num_missing > 1 and grants[i] < num_missing and budget:
                grants[i], budget = grants[i] + 1, budget - 1
    return grants


@wrong(SPLIT, "One number for each request")
def only_those_who_get_some(missing, budget):
    grants = []
    for num_missing in sorted(missing):
        if budget:
            grants.append(min(num_missing, budget))
            budget -= grants[-1]
    return grants if len(grants) < len(missing) else [g for g in grants if g > 1]


@wrong(SPLIT, "the oldest come first")
def newest_decodes(missing, budget):
    grants = [0] * len(missing)
    for i in reversed(range(len(missing))):
        if missing[i] == 1 and budget:
            grants[i], budget = 1, budget - 1
    for i, num_missing in enumerate(missing):
        if num_missing > 1:
            grants[i] = min(num_missing, budget)
            budget -= grants[i]
    return grants


@wrong(SPLIT, "The older prompt comes first")
def shortest_first(missing, budget):
    grants = [0] * len(missing)
    for i in sorted(range(len(missing)), key=lambda i: missing[i]):
        grants[i] = min(missing[i], budget)
        budget -= grants[i]
    return grants


@wrong(SPLIT, "A prompt takes a token that a decode needs")
def one_for_everybody_first(missing, budget):
    grants = [0] * len(missing)
    for i in range(len(missing)):
        if budget:
            grants[i], budget = 1, budget - 1
    for i, num_missing in enumerate(missing):
        more = min(num_missing - grants[i], budget)
        grants[i] += more
        budget -= more
    return grants


@wrong(SPLIT, "The older prompt comes first")
def decodes_then_one_for_each_prompt(missing, budget):
    grants = [0] * len(missing)
    for decodes in (True, False):
        for i, num_missing in enumerate(missing):
            if (num_missing == 1) is decodes and budget:
                grants[i], budget = 1, budget - 1
    for i, num_missing in enumerate(missing):
        more = min(num_missing - grants[i], budget)
        grants[i] += more
        budget -= more
    return grants


@wrong(SPLIT, "The answer is in the order of `missing`: don't sort it")
def sorts(missing, budget):
    missing.sort()
    grants = []
    for num_missing in missing:
        grants.append(min(num_missing, budget))
        budget -= grants[-1]
    return grants


@wrong(SPLIT, "Only 2 are left: the oldest 2 get one each")
def every_decode_whatever_is_left(missing, budget):
    grants = [1 if num_missing == 1 else 0 for num_missing in missing]
    left = max(budget - sum(grants), 0)
    for i, num_missing in enumerate(missing):
        if num_missing > 1:
            grants[i] = min(num_missing, left)
            left -= grants[i]
    return grants


@wrong(SPLIT, "though the budget has one")
def the_last_token_is_kept(missing, budget):
    grants = [0] * len(missing)
    for decodes in (True, False):
        for i, num_missing in enumerate(missing):
            if (num_missing == 1) is decodes and budget > 1:
                grants[i] = min(num_missing, budget)
                budget -= grants[i]
    return grants


@wrong(SPLIT, "give an int, not a float")
def floats(missing, budget):
    grants = [0] * len(missing)
    for decodes in (True, False):
        for i, num_missing in enumerate(missing):
            if (num_missing == 1) is decodes:
                grants[i] = min(num_missing, budget) / 1
                budget -= grants[i]
    return grants


SCHEDULE = "nanoteach.chunked_prefill.ChunkedPrefillScheduler.schedule"


@second(SCHEDULE)
def by_counting(self):
    self.block_manager.begin_step()
    preemptions = self.num_preemptions
    missing = [len(seq.token_ids) - seq.num_computed_tokens for seq in self.running]
    step = list(self.continue_running(split_budget(missing, self.max_num_batched_tokens)))
    if self.num_preemptions > preemptions:
        return step
    left = self.max_num_batched_tokens - sum(part.num_new for part in step)
    for part in self.admit(left):
        step.append(part)
    return step


@wrong(SCHEDULE, "over the budget: `admit` gets what the running ones left")
def whole_budget_twice(self):
    self.block_manager.begin_step()
    grants = split_budget(
        [seq.num_missing_tokens for seq in self.running], self.max_num_batched_tokens
    )
    scheduled = self.continue_running(grants)
    if len(self.running) < len(grants):
        return scheduled
    return scheduled + self.admit(self.max_num_batched_tokens)


@wrong(SCHEDULE, "Nobody runs yet: `admit` takes in who waits")
def nobody_admitted(self):
    self.block_manager.begin_step()
    missing = [seq.num_missing_tokens for seq in self.running]
    return self.continue_running(split_budget(missing, self.max_num_batched_tokens))


@wrong(SCHEDULE, "Only the new one gets on")
def prompts_or_decodes(self):
    self.block_manager.begin_step()
    new = self.admit(self.max_num_batched_tokens)
    if new:
        return new
    missing = [seq.num_missing_tokens for seq in self.running]
    return self.continue_running(split_budget(missing, self.max_num_batched_tokens))


@wrong(SCHEDULE, "is in mid-prompt")
def one_token_each(self):
    self.block_manager.begin_step()
    budget = self.max_num_batched_tokens
    grants = [1] * min(len(self.running), budget)
    before = len(self.running)
    scheduled = self.continue_running(grants)
    if len(self.running) < before:
        return scheduled
    return scheduled + self.admit(budget - sum(grants))


@wrong(SCHEDULE, "let the running ones continue first")
def admits_first(self):
    self.block_manager.begin_step()
    budget = self.max_num_batched_tokens
    new = self.admit(budget)
    grants = split_budget([seq.num_missing_tokens for seq in self.running], budget)
    return new + self.continue_running(grants)


@wrong(SCHEDULE, "each step begins with the block manager's `begin_step`")
def no_begin_step(self):
    budget = self.max_num_batched_tokens
    grants = split_budget([seq.num_missing_tokens for seq in self.running], budget)
    scheduled = self.continue_running(grants)
    if len(self.running) < len(grants):
        return scheduled
    return scheduled + self.admit(budget - sum(grants))


@second(SCHEDULE)
def new_ones_in_front(self):
    self.block_manager.begin_step()
    budget = self.max_num_batched_tokens
    grants = split_budget([seq.num_missing_tokens for seq in self.running], budget)
    running = self.continue_running(grants)
    return self.admit(budget - sum(part.num_new for part in running)) + running


@wrong(SCHEDULE, "take off what was granted, not what is missing")
def takes_off_what_is_missing(self):
    self.block_manager.begin_step()
    budget = self.max_num_batched_tokens
    missing = [seq.num_missing_tokens for seq in self.running]
    scheduled = self.continue_running(split_budget(missing, budget))
    return scheduled + self.admit(budget - sum(missing))


@wrong(SCHEDULE, "may take the blocks of the newest: call it before `admit`")
def admits_first_what_is_left(self):
    self.block_manager.begin_step()
    budget = self.max_num_batched_tokens
    grants = split_budget([seq.num_missing_tokens for seq in self.running], budget)
    new = self.admit(budget - sum(grants))
    return self.continue_running(grants) + new


@wrong(SCHEDULE, "subtract tokens, not requests")
def takes_off_requests(self):
    self.block_manager.begin_step()
    budget = self.max_num_batched_tokens
    missing = [seq.num_missing_tokens for seq in self.running]
    scheduled = self.continue_running(split_budget(missing, budget))
    return scheduled + self.admit(budget - len(scheduled))


@wrong(SCHEDULE, "put them together")
def a_list_of_two_lists(self):
    self.block_manager.begin_step()
    budget = self.max_num_batched_tokens
    grants = split_budget([seq.num_missing_tokens for seq in self.running], budget)
    return [self.continue_running(grants), self.admit(budget - sum(grants))]
