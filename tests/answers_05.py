"""Second and wrong answers to the exercises of notebook 05; see course_cases.py."""

from course_cases import second, wrong

HASH = "nanoteach.prefix_cache.hash_block"


@second(HASH)
def token_by_token(parent, token_ids):
    name = sha256()
    name.update(parent)
    for token in token_ids:
        name.update(token.to_bytes(4, "big"))
    return name.digest()


@second(HASH)
def with_commas(parent, token_ids):
    return sha256(parent + ",".join(map(str, token_ids)).encode()).digest()


@wrong(HASH, "the parent's name must go into the hash")
def tokens_alone(parent, token_ids):
    return sha256(struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


@wrong(HASH, "Where does one token end and the next begin")
def no_separator(parent, token_ids):
    return sha256(parent + "".join(map(str, token_ids)).encode()).digest()


@wrong(HASH, "one byte is not enough")
def one_byte(parent, token_ids):
    return sha256(parent + bytes(token % 256 for token in token_ids)).digest()


@wrong(HASH, "two bytes are not enough")
def two_bytes(parent, token_ids):
    short = [token % 65536 for token in token_ids]
    return sha256(parent + struct.pack(f"<{len(short)}H", *short)).digest()


@wrong(HASH, "must be bytes: digest()")
def as_text(parent, token_ids):
    return sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).hexdigest()


@wrong(HASH, "must be bytes: digest()")
def python_hash(parent, token_ids):
    return hash((parent, tuple(token_ids)))


@wrong(HASH, "may be borne by two different blocks")
def too_short(parent, token_ids):
    return sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()[:8]


@wrong(HASH, "The order of the tokens matters")
def as_a_set(parent, token_ids):
    return sha256(parent + struct.pack(f"<{len(token_ids)}q", *sorted(token_ids))).digest()


PREFIX = "nanoteach.prefix_cache.PrefixCachingBlockManager.longest_prefix"


@second(PREFIX)
def grow_while_known(self, seq):
    names = self.names(seq, len(seq.token_ids) // self.block_size)
    count = 0
    while (
        count < len(names)
        and names[count] in self.block_of
        and (count + 1) * self.block_size < len(seq.token_ids)
    ):
        count += 1
    return [self.block_of[name] for name in names[:count]]


@wrong(PREFIX, "At most all tokens but one")
def all_full_blocks(self, seq):
    blocks = []
    for name in self.names(seq, len(seq.token_ids) // self.block_size):
        if name not in self.block_of:
            break
        blocks.append(self.block_of[name])
    return blocks


@wrong(PREFIX, "one is left, and that is enough")
def one_block_less(self, seq):
    blocks = []
    for name in self.names(seq, len(seq.token_ids) // self.block_size - 1):
        if name not in self.block_of:
            break
        blocks.append(self.block_of[name])
    return blocks


@wrong(PREFIX, "a prefix has no holes")
def with_holes(self, seq):
    names = self.names(seq, (len(seq.token_ids) - 1) // self.block_size)
    return [self.block_of[name] for name in names if name in self.block_of]


@wrong(PREFIX, "those it generated too")
def prompt_only(self, seq):
    blocks = []
    for name in self.names(seq, (seq.num_prompt_tokens - 1) // self.block_size):
        if name not in self.block_of:
            break
        blocks.append(self.block_of[name])
    return blocks


@wrong(PREFIX, "not the number of tokens")
def number_of_tokens(self, seq):
    count = 0
    for name in self.names(seq, (len(seq.token_ids) - 1) // self.block_size):
        if name not in self.block_of:
            break
        count += self.block_size
    return count


@wrong(PREFIX, "This only looks")
def holds_them_too(self, seq):
    blocks = []
    for name in self.names(seq, (len(seq.token_ids) - 1) // self.block_size):
        if name not in self.block_of:
            break
        blocks.append(self.block_of[name])
        self.ref_counts[self.block_of[name]] += 1
    return blocks


@wrong(PREFIX, "it knows about the salt")
def without_salt(self, seq):
    blocks, name = [], b""
    for i in range((len(seq.token_ids) - 1) // self.block_size):
        tokens = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
        name = hash_block(name, tokens)
        if name not in self.block_of:
            break
        blocks.append(self.block_of[name])
    return blocks


@wrong(PREFIX, "Block 0 is a block too")
def zero_is_nothing(self, seq):
    blocks = []
    for name in self.names(seq, (len(seq.token_ids) - 1) // self.block_size):
        block = self.block_of.get(name)
        if not block:
            break
        blocks.append(block)
    return blocks


@wrong(PREFIX, "a name that is missing. Stop there")
def every_name_is_there(self, seq):
    most = (len(seq.token_ids) - 1) // self.block_size
    return [self.block_of[name] for name in self.names(seq, most)]


MATCH = "nanoteach.prefix_cache.PrefixCachingBlockManager.match_prefix"


@second(MATCH)
def free_or_held(self, owner):
    tokens = 0
    owner.block_table = []
    for block in self.longest_prefix(owner):
        if self.ref_counts[block] == 0:
            del self.free_blocks[block]
        self.ref_counts[block] = self.ref_counts[block] + 1
        owner.block_table.append(block)
        tokens += self.block_size
    return tokens


@wrong(MATCH, "it would be handed out and overwritten")
def still_free(self, owner):
    owner.block_table = self.longest_prefix(owner)
    for block in owner.block_table:
        self.ref_counts[block] += 1
    return len(owner.block_table) * self.block_size


@wrong(MATCH, "The new holder is not counted")
def not_counted(self, owner):
    owner.block_table = self.longest_prefix(owner)
    for block in owner.block_table:
        self.free_blocks.pop(block, None)
    return len(owner.block_table) * self.block_size


@wrong(MATCH, "The new holder is not counted")
def counts_to_one(self, owner):
    owner.block_table = self.longest_prefix(owner)
    for block in owner.block_table:
        self.free_blocks.pop(block, None)
        self.ref_counts[block] = 1
    return len(owner.block_table) * self.block_size


@wrong(MATCH, "somebody holds is not among the free ones")
def always_free_before(self, owner):
    owner.block_table = self.longest_prefix(owner)
    for block in owner.block_table:
        del self.free_blocks[block]
        self.ref_counts[block] += 1
    return len(owner.block_table) * self.block_size


@wrong(MATCH, "block_size in each block")
def number_of_blocks(self, owner):
    owner.block_table = self.longest_prefix(owner)
    for block in owner.block_table:
        self.free_blocks.pop(block, None)
        self.ref_counts[block] += 1
    return len(owner.block_table)


@wrong(MATCH, "the owner must also hold them")
def no_table(self, owner):
    blocks = self.longest_prefix(owner)
    for block in blocks:
        self.free_blocks.pop(block, None)
        self.ref_counts[block] += 1
    return len(blocks) * self.block_size


@wrong(MATCH, "takes the first free block, not the one that was found")
def any_free_block(self, owner):
    owner.block_table = self.longest_prefix(owner)
    for block in owner.block_table:
        if self.ref_counts[block] == 0:
            self.take_free_block()
        self.ref_counts[block] += 1
    return len(owner.block_table) * self.block_size


@wrong(MATCH, "takes the first free block, not the one that was found")
def other_blocks(self, owner):
    owner.block_table = [self.take_free_block() for _ in self.longest_prefix(owner)]
    return len(owner.block_table) * self.block_size


TAKE = "nanoteach.prefix_cache.PrefixCachingBlockManager.take_free_block"


@second(TAKE)
def by_hand(self):
    block = next(iter(self.free_blocks))
    del self.free_blocks[block]
    self.ref_counts[block] = 1
    for name, named in list(self.block_of.items()):
        if named == block:
            del self.block_of[name], self.name_of[block]
    return block


@wrong(TAKE, "would read what somebody else writes there now")
def keeps_the_name(self):
    return super().take_free_block()


@wrong(TAKE, "would read what somebody else writes there now")
def only_name_of(self):
    block = super().take_free_block()
    self.name_of.pop(block, None)
    return block


@wrong(TAKE, "both dictionaries must agree")
def only_block_of(self):
    block = super().take_free_block()
    self.block_of.pop(self.name_of.get(block), None)
    return block


@wrong(TAKE, "a free block need not have a name")
def always_a_name(self):
    block = super().take_free_block()
    del self.block_of[self.name_of.pop(block)]
    return block


@wrong(TAKE, "the least recently used is at the other end")
def newest(self):
    block, _ = self.free_blocks.popitem(last=True)
    self.ref_counts[block] = 1
    self.forget(block)
    return block


@wrong(TAKE, "is held once: ref_counts")
def nobody_holds_it(self):
    block, _ = self.free_blocks.popitem(last=False)
    self.forget(block)
    return block


@wrong(TAKE, "Only the block that is handed out loses its name")
def forgets_all(self):
    block = super().take_free_block()
    self.name_of.clear()
    self.block_of.clear()
    return block
