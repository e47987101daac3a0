"""Notebook 00, answered. `python solutions/00_measure_first.py` checks every answer."""

from nanoteach.course import exercise

# K and V (2) of every layer, each kv_size = num_kv_heads * head_dim values wide. Common wrong
# turns: K alone (half of it), one layer only, and q_size in the place of kv_size: with
# grouped-query attention there are fewer K/V heads than query heads, and saving memory is what
# that is for.


@exercise("nanoteach.cost_model.kv_bytes_per_token")
def kv_bytes_per_token(config, bytes_per_value: int = 2) -> int:
    """Bytes of one token's K and V in all layers."""
    return 2 * config.num_layers * config.kv_size * bytes_per_value


# A rectangle (each new token sees the whole history) and a triangle (new tokens see each other
# causally, and themselves), request by request. Common wrong turns: the whole square in the place
# of the triangle, a triangle without its diagonal, and one triangle for all requests together.


@exercise("nanoteach.cost_model.num_attended")
def num_attended(work) -> int:
    """Pairs of a new token and a token it attends to: itself and all before it, causally."""
    pairs = 0
    for request in work:
        rectangle = request.num_new * request.num_computed
        triangle = request.num_new * (request.num_new + 1) // 2
        pairs += rectangle + triangle
    return pairs


# Every new token goes through every layer; one row for each request that wants logits goes
# through the head. Common wrong turns: 1 FLOP for a multiply and an add, where there are 2; the
# head for every token, which makes a prefill look a third dearer than it is; and no attention at
# all, which is nearly right for short texts and badly wrong for long ones.


@exercise("nanoteach.cost_model.step_flops")
def step_flops(config, work) -> int:
    """FLOPs of a step's matrix products: the layers, attention, and the LM head."""
    new_tokens = sum(request.num_new for request in work)
    rows_of_head = sum(request.needs_logits for request in work)
    layers = 2 * layer_matrix_parameters(config) * config.num_layers * new_tokens
    head = 2 * embedding_parameters(config) * rows_of_head
    return layers + attention_flops(config, work) + head


# The weights do not depend on how many requests share the step: that is why batching pays. K/V
# do. Common wrong turns: the weights once for each request; K/V of the new token alone, where a
# decode reads its whole history; and a dtype that is right for the weights and forgotten for K/V.


@exercise("nanoteach.cost_model.step_bytes")
def step_bytes(config, work, bytes_per_value: int = 2) -> int:
    """Bytes that a step must move: the weights once, K/V read for the history and written anew."""
    if not work:
        return 0
    weights = weight_bytes_read(config, bytes_per_value)
    if not any(request.needs_logits for request in work):
        weights -= embedding_parameters(config) * bytes_per_value
    tokens = sum(request.num_computed + request.num_new for request in work)
    return weights + tokens * kv_bytes_per_token(config, bytes_per_value)


# The longer of two times that overlap. Common wrong turns: their sum (no overlap; at most twice
# too slow, so it looks plausible), and copy_bandwidth, which counts every byte twice.


@exercise("nanoteach.cost_model.Cost.seconds")
def seconds(self, hardware) -> float:
    """The bound, in seconds: computing and moving overlap perfectly."""
    computing = self.flops / hardware.flops
    moving = self.bytes / hardware.read_bandwidth
    return max(computing, moving)
