"""From token ids to text, a token at a time.

One token is not one piece of text: a character may take several byte-level tokens, and some
tokenizers put a space before a token depending on the one before it. So a new piece is what a short
window of tokens says more than it said without them, once it ends in a whole character.
"""

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character yet


class Detokenizer:
    """The text of a growing list of tokens, special tokens left out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.text = ""
        self.window = 0  # tokens from here on are decoded again, for context
        self.read = 0  # tokens up to here are in the text

    def extend(self, token_ids: list[int], final: bool = False) -> None:
        """Add tokens. `final`: no more will come, so half a character is written as it is."""
        self.token_ids += token_ids
        before = self.decode(self.token_ids[self.window : self.read])
        after = self.decode(self.token_ids[self.window :])
        if final or not after.endswith(UNFINISHED):
            self.text += after[len(before) :]
            self.window, self.read = self.read, len(self.token_ids)

    def decode(self, token_ids: list[int]) -> str:
        """The tokens' text."""
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
