"""Second and wrong answers to the exercises of notebook 00; see course_cases.py."""

from course_cases import second, wrong

KV_BYTES = "nanoteach.cost_model.kv_bytes_per_token"


@second(KV_BYTES)
def adds_up(config, bytes_per_value=2):
    total = 0
    for _ in range(config.num_layers):
        for _ in ("K", "V"):
            total += config.num_kv_heads * config.head_dim * bytes_per_value
    return total


@wrong(KV_BYTES, "K and V are two")
def keys_only(config, bytes_per_value=2):
    return config.num_layers * config.kv_size * bytes_per_value


@wrong(KV_BYTES, "Every layer keeps")
def one_layer(config, bytes_per_value=2):
    return 2 * config.kv_size * bytes_per_value


@wrong(KV_BYTES, "Only the K/V heads are kept")
def query_heads(config, bytes_per_value=2):
    return 2 * config.num_layers * config.q_size * bytes_per_value


@wrong(KV_BYTES, "How many bytes does each take")
def values(config, bytes_per_value=2):
    return 2 * config.num_layers * config.kv_size


@wrong(KV_BYTES, "bytes_per_value is not used")
def always_bfloat16(config, bytes_per_value=2):
    return 2 * config.num_layers * config.kv_size * 2


@wrong(KV_BYTES, "Keep the stub's arguments")
def argument_lost(config):
    return 2 * config.num_layers * config.kv_size * 2


@wrong(KV_BYTES, "use //, not /")
def by_a_float(config, bytes_per_value=2):
    return config.num_layers * config.kv_size * bytes_per_value / 0.5


@wrong(KV_BYTES, "width of the residual stream")
def hidden(config, bytes_per_value=2):
    return 2 * config.num_layers * config.hidden_size * bytes_per_value


@wrong(KV_BYTES, "is a `return` missing")
def no_return(config, bytes_per_value=2):
    total = 2 * config.num_layers * config.kv_size * bytes_per_value


ATTENDED = "nanoteach.cost_model.num_attended"


@second(ATTENDED)
def token_by_token(work):
    pairs = 0
    for num_new, num_computed, _ in work:
        for position in range(num_computed, num_computed + num_new):
            pairs += position + 1
    return pairs


@wrong(ATTENDED, "does not see the new tokens after it")
def rectangle(work):
    return sum(r.num_new * (r.num_computed + r.num_new) for r in work)


@wrong(ATTENDED, "also attends to itself")
def not_itself(work):
    return sum(r.num_new * r.num_computed + r.num_new * (r.num_new - 1) // 2 for r in work)


@wrong(ATTENDED, "Requests do not see each other")
def one_triangle(work):
    total = sum(r.num_new for r in work)
    history = sum(r.num_computed for r in work)
    return total * history + total * (total + 1) // 2


@wrong(ATTENDED, "The history's own pairs were computed")
def whole_triangle(work):
    return sum((r.num_new + r.num_computed) * (r.num_new + r.num_computed + 1) // 2 for r in work)


@wrong(ATTENDED, "each those before it and itself")
def history_only(work):
    return sum(r.num_new * r.num_computed for r in work)


@wrong(ATTENDED, "use //, not /")
def float_triangle(work):
    return sum(r.num_new * r.num_computed + r.num_new * (r.num_new + 1) / 2 for r in work)


@wrong(ATTENDED, "expected 43,232 got 8,256 likely That is the first request alone")
def returns_in_the_loop(work):
    pairs = 0
    for r in work:
        pairs += r.num_new * r.num_computed + r.num_new * (r.num_new + 1) // 2
        return pairs
    return pairs


FLOPS = "nanoteach.cost_model.step_flops"


@second(FLOPS)
def request_by_request(config, work):
    total = 0
    for request in work:
        values = request.num_new * config.num_layers * layer_matrix_parameters(config)
        if request.needs_logits:
            values += config.vocab_size * config.hidden_size
        total += 2 * values + attention_flops(config, [request])
    return total


@wrong(FLOPS, "multiplies and adds")
def one_flop_a_value(config, work):
    new = sum(r.num_new for r in work)
    head = embedding_parameters(config) * sum(r.needs_logits for r in work)
    layers = config.num_layers * layer_matrix_parameters(config) * new
    return layers + attention_flops(config, work) + head


@wrong(FLOPS, "not after every token")
def logits_of_all(config, work):
    new = sum(r.num_new for r in work)
    values = config.num_layers * layer_matrix_parameters(config) + embedding_parameters(config)
    return 2 * values * new + attention_flops(config, work)


@wrong(FLOPS, "Attention itself is missing")
def no_attention(config, work):
    new = sum(r.num_new for r in work)
    head = 2 * embedding_parameters(config) * sum(r.needs_logits for r in work)
    return 2 * config.num_layers * layer_matrix_parameters(config) * new + head


@wrong(FLOPS, "layer_matrix_parameters is one layer's")
def only_one_layer(config, work):
    new = sum(r.num_new for r in work)
    head = 2 * embedding_parameters(config) * sum(r.needs_logits for r in work)
    return 2 * layer_matrix_parameters(config) * new + attention_flops(config, work) + head


@wrong(FLOPS, "once for each request that needs logits")
def head_always(config, work):
    new = sum(r.num_new for r in work)
    head = 2 * embedding_parameters(config)
    layers = 2 * config.num_layers * layer_matrix_parameters(config) * new
    return layers + attention_flops(config, work) + head


@wrong(FLOPS, "The history went through the layers in earlier steps")
def history_again(config, work):
    tokens = sum(r.num_new + r.num_computed for r in work)
    head = 2 * embedding_parameters(config) * sum(r.needs_logits for r in work)
    layers = 2 * config.num_layers * layer_matrix_parameters(config) * tokens
    return layers + attention_flops(config, work) + head


@wrong(FLOPS, "attention_flops counts all layers already")
def attention_times_layers(config, work):
    new = sum(r.num_new for r in work)
    head = 2 * embedding_parameters(config) * sum(r.needs_logits for r in work)
    layer = 2 * layer_matrix_parameters(config) * new + attention_flops(config, work)
    return config.num_layers * layer + head


@wrong(FLOPS, "attention_flops has its factor 2 already")
def two_everywhere(config, work):
    new = sum(r.num_new for r in work)
    head = embedding_parameters(config) * sum(r.needs_logits for r in work)
    layers = config.num_layers * layer_matrix_parameters(config) * new
    return 2 * (layers + attention_flops(config, work) + head)


BYTES = "nanoteach.cost_model.step_bytes"


@second(BYTES)
def sum_of_parts(config, work, bytes_per_value=2):
    total = 0
    for n, request in enumerate(work):
        if n == 0:
            total += weight_bytes_read(config, bytes_per_value)
            if True not in [r.needs_logits for r in work]:
                total -= config.vocab_size * config.hidden_size * bytes_per_value
        total += request.num_computed * kv_bytes_per_token(config, bytes_per_value)
        total += request.num_new * kv_bytes_per_token(config, bytes_per_value)
    return total


@wrong(BYTES, "The weights are read once a step")
def weights_each(config, work, bytes_per_value=2):
    return sum(
        weight_bytes_read(config, bytes_per_value)
        + (r.num_computed + r.num_new) * kv_bytes_per_token(config, bytes_per_value)
        for r in work
    )


@wrong(BYTES, "the K/V of its whole history")
def new_tokens_only(config, work, bytes_per_value=2):
    new = sum(r.num_new for r in work)
    return weight_bytes_read(config, bytes_per_value) + new * kv_bytes_per_token(
        config, bytes_per_value
    )


@wrong(BYTES, "new tokens' K/V are written")
def nothing_written(config, work, bytes_per_value=2):
    history = sum(r.num_computed for r in work)
    return weight_bytes_read(config, bytes_per_value) + history * kv_bytes_per_token(
        config, bytes_per_value
    )


@wrong(BYTES, "the LM head is not read")
def head_always_read(config, work, bytes_per_value=2):
    tokens = sum(r.num_computed + r.num_new for r in work)
    kv = tokens * kv_bytes_per_token(config, bytes_per_value)
    return weight_bytes_read(config, bytes_per_value) + kv if work else 0


@wrong(BYTES, "Count with bytes_per_value")
def always_two_bytes(config, work, bytes_per_value=2):
    if not work:
        return 0
    weights = weight_bytes_read(config)
    if not any(r.needs_logits for r in work):
        weights -= 2 * embedding_parameters(config)
    return weights + sum(r.num_computed + r.num_new for r in work) * kv_bytes_per_token(config)


@wrong(BYTES, "The head is read once if anyone wants logits, else not at all")
def head_for_each_request(config, work, bytes_per_value=2):
    if not work:
        return 0
    without = sum(not r.needs_logits for r in work)
    weights = weight_bytes_read(config, bytes_per_value)
    weights -= without * embedding_parameters(config) * bytes_per_value
    tokens = sum(r.num_computed + r.num_new for r in work)
    return weights + tokens * kv_bytes_per_token(config, bytes_per_value)


@wrong(BYTES, "The head is read once if anyone wants logits, else not at all")
def head_if_all_want_it(config, work, bytes_per_value=2):
    if not work:
        return 0
    weights = weight_bytes_read(config, bytes_per_value)
    if not all(r.needs_logits for r in work):
        weights -= embedding_parameters(config) * bytes_per_value
    tokens = sum(r.num_computed + r.num_new for r in work)
    return weights + tokens * kv_bytes_per_token(config, bytes_per_value)


@wrong(BYTES, "embedding_parameters gives values")
def values_of_the_head(config, work, bytes_per_value=2):
    if not work:
        return 0
    weights = weight_bytes_read(config, bytes_per_value)
    if not any(r.needs_logits for r in work):
        weights -= embedding_parameters(config)
    tokens = sum(r.num_computed + r.num_new for r in work)
    return weights + tokens * kv_bytes_per_token(config, bytes_per_value)


@wrong(BYTES, "K/V count once: as they are written")
def written_and_read(config, work, bytes_per_value=2):
    tokens = sum(r.num_computed + 2 * r.num_new for r in work)
    kv = tokens * kv_bytes_per_token(config, bytes_per_value)
    return weight_bytes_read(config, bytes_per_value) + kv


@wrong(BYTES, "Pairs are counted for FLOPs")
def kv_of_every_pair(config, work, bytes_per_value=2):
    kv = num_attended(work) * kv_bytes_per_token(config, bytes_per_value)
    return weight_bytes_read(config, bytes_per_value) + kv


SECONDS = "nanoteach.cost_model.Cost.seconds"


@second(SECONDS)
def compare(self, hardware):
    if self.flops * hardware.read_bandwidth > self.bytes * hardware.flops:
        return self.flops / hardware.flops
    return self.bytes / hardware.read_bandwidth


@wrong(SECONDS, "the times overlap")
def added(self, hardware):
    return self.flops / hardware.flops + self.bytes / hardware.read_bandwidth


@wrong(SECONDS, "the slower of the two")
def faster(self, hardware):
    return min(self.flops / hardware.flops, self.bytes / hardware.read_bandwidth)


@wrong(SECONDS, "take read_bandwidth")
def copies(self, hardware):
    return max(self.flops / hardware.flops, self.bytes / hardware.copy_bandwidth)


@wrong(SECONDS, "here that is moving the bytes")
def flops_only(self, hardware):
    return self.flops / hardware.flops


@wrong(SECONDS, "Upside down: FLOPs ÷ FLOPs a second are seconds")
def upside_down(self, hardware):
    return max(hardware.flops / self.flops, hardware.read_bandwidth / self.bytes)
