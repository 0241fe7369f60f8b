r"""A tokenizer of about a hundred tokens for the search team: names, verdicts, and what stands between them.

The workflow's prompts are long and fixed but for names. Cut at those, its texts consist of a few fixed pieces
(`...\n\nQuestion: Who is the rival of the mentor of `, `'s mentor is `, `<search>`), and each is a token: a prompt of
two hundred words is forty tokens long, byte for byte the one that a large model would read. What is in no lesson is
one unknown token.
"""

import re
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.cpu_search.lessons import Lesson
from verl_drmas.data.world import World

SPECIAL = ("<pad>", "<eos>", "<unk>")
BARE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(
    world: World, lessons: Iterable[Lesson], *, template: str = BARE_TEMPLATE, marks: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of all pieces that occur in the lessons.

    Args:
        world: its people are tokens, whether or not a lesson names them.
        lessons: where the pieces between them come from.
        template: for chat messages.
        marks: further special tokens, which the template uses.
    """
    words = sorted((*world.people, "yes", "no"))
    pattern = rf"\b(?:{'|'.join(map(re.escape, words))})\b"
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    apart = re.compile("|".join(map(re.escape, marks))) if marks else None
    texts = (text for lesson in lessons for text in (lesson.prompt, lesson.said, *lesson.wrong))
    parts = (part for text in texts for part in (apart.split(text) if apart else [text]))
    pieces = {piece for part in parts for piece, _ in cut.pre_tokenize_str(part)}
    tokens = [*SPECIAL, *marks, *words, *sorted(pieces - set(words))]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = cut, decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(marks),
        chat_template=template,
    )
