"""From token ids to text, a token at a time.

One token is not one piece of text. A character may take several byte-level tokens. Some tokenizers
drop the space before a text's first word, so a token alone loses the space that it has in a text.
And some (Llama's) have a token for each byte, and turn a whole run of these into replacement
characters if one byte in it is wrong. So a piece is what the new tokens add to a few tokens before
them, once nothing that may follow can change it.

The pieces, joined, are what the tokenizer's own `decode` says to all tokens at once.
"""

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character yet
WRONG_BYTE = "<0xFF>"  # a byte that no UTF-8 text has, where a tokenizer has a token for each byte
LONG_PIECE = 64


class Detokenizer:
    """The text of a growing list of tokens, special tokens left out. `text` only ever grows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self.num_tokens = 0
        self.context: list[int] = []  # the tokens of the last piece of `text`
        self.pending: list[int] = []  # those that came after it
        self.try_at = 0  # pending tokens to wait for
        # The library's own `decode` does the same, and takes eight times as long.
        plain = isinstance(tokenizer, PreTrainedTokenizerFast) and (
            type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        )
        self.backend = tokenizer.backend_tokenizer if plain else None
        wrong_byte = tokenizer.convert_tokens_to_ids(WRONG_BYTE)
        known = wrong_byte not in (None, tokenizer.unk_token_id)
        self.wrong_byte: list[int] = [wrong_byte] if known else []

    def extend(self, token_ids: list[int], final: bool = False) -> None:
        """Add tokens. `final`: no more will come, so half a character is written as it is."""
        self.num_tokens += len(token_ids)
        self.pending += token_ids
        if not final and (not token_ids or len(self.pending) < self.try_at):
            return
        piece = self.new_text(final)
        if piece is not None:
            self.text += piece
            self.context, self.pending, self.try_at = self.pending, [], 0
        elif len(self.pending) > LONG_PIECE:
            # One that takes long is tried again when it has grown by an eighth, so that a text of
            # n tokens costs a multiple of n and not of n squared.
            self.try_at = len(self.pending) * 9 // 8

    def new_text(self, final: bool) -> str | None:
        """What the pending tokens add to the text, or None if it is to wait for more of them.

        It waits while it is empty, or while what comes next may change it; not if this is `final`.
        """
        before = self.decode(self.context)
        after = self.decode(self.context + self.pending)
        if final or (len(after) > len(before) and self.is_settled(after)):
            return after[len(before) :]
        return None

    def is_settled(self, text: str) -> bool:
        """Whether the text of context and pending tokens stays, whatever comes next."""
        if text.endswith(UNFINISHED):
            return False
        if not self.wrong_byte:
            return True
        return self.decode(self.context + self.pending + self.wrong_byte).startswith(text)

    def decode(self, token_ids: list[int]) -> str:
        """The tokens' text."""
        if self.backend:
            return str(self.backend.decode(token_ids, skip_special_tokens=True))
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def text_of_token(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """One token's text, where it follows a letter. (Alone, Llama's would lose a space before it.)

    Of a part of a character it is replacement characters.
    """
    letter = tokenizer.encode("a", add_special_tokens=False)
    before, after = (
        str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
        for token_ids in (letter, [*letter, token_id])
    )
    return after[len(before) :]
