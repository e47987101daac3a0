"""Second and wrong answers to the exercises of notebook 01; see course_cases.py."""

from course_cases import second, wrong

NORM = "nanoteach.model.rms_norm"


@second(NORM)
def by_length(x, weight, eps):
    size = x.shape[-1]
    length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
    return (x / (length.square() / size + eps).sqrt()).to(x.dtype) * weight


@wrong(NORM, "That is LayerNorm")
def layer_norm(x, weight, eps):
    x32 = x.float()
    centred = x32 - x32.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return (centred * scale).to(x.dtype) * weight


@wrong(NORM, "not their sum")
def summed(x, weight, eps):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype) * weight


@wrong(NORM, "eps goes to the mean square")
def eps_outside(x, weight, eps):
    x32 = x.float()
    return (x32 / (x32.pow(2).mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype) * weight


@wrong(NORM, "over the last dimension only")
def one_scale_for_all(x, weight, eps):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean() + eps)).to(x.dtype) * weight


@wrong(NORM, "multiplied by its weight")
def no_weight(x, weight, eps):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@wrong(NORM, "more than float16 holds")
def in_half(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@wrong(NORM, "Give back the dtype that x came with")
def stays_wide(x, weight, eps):
    x32 = x.float()
    return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * weight


@wrong(NORM, "Divide by the root")
def no_root(x, weight, eps):
    x32 = x.float()
    return (x32 / (x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@wrong(NORM, "expected x as it was got x changed likely Your function changed x")
def in_place(x, weight, eps):
    y = x.float()
    y *= torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight


@wrong(NORM, "x was overwritten, and its first dtype is lost")
def overwrites_x(x, weight, eps):
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x.to(x.dtype) * weight


@wrong(NORM, "expected tensor([[-0.5455, 0.08321,")  # four digits
def no_eps(x, weight, eps):
    y = x.float()
    return (y / y.pow(2).mean(-1, keepdim=True).sqrt()).to(x.dtype) * weight


ROTARY = "nanoteach.model.apply_rotary"


@second(ROTARY)
def rotate_half(x, cos, sin):
    half = x.shape[-1] // 2
    quarter_turn = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * torch.cat((cos, cos), dim=-1) + quarter_turn * torch.cat((sin, sin), dim=-1)


@wrong(ROTARY, "That pairs neighbours")
def neighbours(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


@wrong(ROTARY, "Turned the wrong way round")
def clockwise(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


@wrong(ROTARY, "A turn keeps a point's length")
def both_added(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos + a * sin), dim=-1)


@wrong(ROTARY, "all first values come first")
def interleaved(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


@wrong(ROTARY, "made of both old ones")
def half_by_half(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos, b * sin), dim=-1)


@wrong(ROTARY, "from the new first half")
def one_after_the_other(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    a = a * cos - b * sin
    b = a * sin + b * cos
    return torch.cat((a, b), dim=-1)


@wrong(ROTARY, "The half is x.shape[-1] // 2, not 32")
def always_32(x, cos, sin):
    a, b = x[..., :32], x[..., 32:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@wrong(ROTARY, "Your function changed x")
def turns_in_place(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half].clone(), x[..., half:].clone()
    x[..., :half] = a * cos - b * sin
    x[..., half:] = a * sin + b * cos
    return x


HEADS = "nanoteach.model.kv_head_map"


@second(HEADS)
def written_down(num_heads, num_kv_heads):
    kv_heads = torch.arange(num_kv_heads)
    return kv_heads.repeat_interleave(num_heads // num_kv_heads).tolist()


@wrong(HEADS, "deals them out in turn")
def modulo(num_heads, num_kv_heads):
    return [head % num_kv_heads for head in range(num_heads)]


@wrong(HEADS, "Divide by the size of a group")
def divided_by_heads(num_heads, num_kv_heads):
    return [head // num_kv_heads for head in range(num_heads)]


@wrong(HEADS, "an entry for each")
def one_for_each_kv_head(num_heads, num_kv_heads):
    return [kv_head * (num_heads // num_kv_heads) for kv_head in range(num_kv_heads)]


@wrong(HEADS, "not a tensor")
def tensor(num_heads, num_kv_heads):
    return torch.arange(num_kv_heads).repeat_interleave(num_heads // num_kv_heads)


@wrong(HEADS, "use //, not /")
def broken_heads(num_heads, num_kv_heads):
    group = num_heads // num_kv_heads
    return [head / group for head in range(num_heads)]


@wrong(HEADS, "use //, not /")
def floats_that_look_whole(num_heads, num_kv_heads):
    return [head // (num_heads / num_kv_heads) for head in range(num_heads)]


LOOP = "nanoteach.naive.NaiveGenerator.generate_one"


@second(LOOP)
def one_list(self, prompt, params):
    text = list(prompt)
    for count in range(1, params.max_tokens + 1):
        token = self.next_token(text)
        text += [token]
        if params.finish_reason(token, count, self.eos_token_ids) == "stop":
            break
    return text[len(prompt) :]


@wrong(LOOP, "it remembers nothing")
def same_question(self, prompt, params):
    output = []
    while True:
        output.append(self.next_token(list(prompt)))
        if params.finish_reason(output[-1], len(output), self.eos_token_ids):
            return output


@wrong(LOOP, "asked about one token alone")
def last_token_only(self, prompt, params):
    output = []
    token_ids = list(prompt)
    while True:
        output.append(self.next_token(token_ids))
        token_ids = output[-1:]
        if params.finish_reason(output[-1], len(output), self.eos_token_ids):
            return output


@wrong(LOOP, "without the prompt")
def with_the_prompt(self, prompt, params):
    output = []
    while True:
        output.append(self.next_token([*prompt, *output]))
        if params.finish_reason(output[-1], len(output), self.eos_token_ids):
            return [*prompt, *output]


@wrong(LOOP, "The end token belongs to the output")
def end_token_lost(self, prompt, params):
    output = []
    while len(output) < params.max_tokens:
        token = self.next_token([*prompt, *output])
        if params.finish_reason(token, len(output), self.eos_token_ids) == "stop":
            break
        output.append(token)
    return output


@wrong(LOOP, "do not append to it")
def grows_the_prompt(self, prompt, params):
    output = []
    while True:
        output.append(self.next_token(prompt))
        prompt.append(output[-1])
        if params.finish_reason(output[-1], len(output), self.eos_token_ids):
            return output


@wrong(LOOP, "There may be several")
def first_end_token(self, prompt, params):
    output = []
    while len(output) < params.max_tokens:
        output.append(self.next_token([*prompt, *output]))
        if output[-1] in self.eos_token_ids[:1] and not params.ignore_eos:
            break
    return output


@wrong(LOOP, "ignores the end token")
def never_ignores(self, prompt, params):
    output = []
    while len(output) < params.max_tokens:
        output.append(self.next_token([*prompt, *output]))
        if output[-1] in self.eos_token_ids:
            break
    return output


@wrong(LOOP, "One too many")
def one_too_many(self, prompt, params):
    output = []
    while True:
        output.append(self.next_token([*prompt, *output]))
        if params.finish_reason(output[-1], len(output) - 1, self.eos_token_ids):
            return output


@wrong(LOOP, "One too few")
def one_too_few(self, prompt, params):
    output = []
    for _ in range(params.max_tokens - 1):
        output.append(self.next_token([*prompt, *output]))
        if params.finish_reason(output[-1], len(output), self.eos_token_ids):
            break
    return output


@wrong(LOOP, "max_tokens never stopped it")
def only_an_end_token_stops_it(self, prompt, params):
    output = []
    while True:
        output.append(self.next_token([*prompt, *output]))
        if params.finish_reason(output[-1], len(output), self.eos_token_ids) == "stop":
            return output


@wrong(LOOP, "count them alone")
def counts_the_prompt(self, prompt, params):
    text = list(prompt)
    while True:
        text.append(self.next_token(text))
        if params.finish_reason(text[-1], len(text), self.eos_token_ids):
            return text
