"""The text that `tiny` learns from, made by a grammar.

A small model can only learn a small world, so we make one: stories with a handful of
plots, small sums, questions about everyday things, and chats that use all of these.
Every document follows from a seed, so anyone can make the same corpus again.

One idea runs through the file. Wherever the grammar has a choice, one option is clearly
favoured, and which one depends on what was said before. So the most likely next word is
clearly the most likely one (greedy decoding is decided, not a coin toss), and yet two
prompts rarely lead to the same text.
"""

from __future__ import annotations

import argparse
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from random import Random
from typing import NamedTuple, TypeVar
from zlib import crc32

T = TypeVar("T")

END = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

KINDS = ("story", "long story", "sums", "facts", "chat")


# ---------------------------------------------------------------------------------------
# Choice
# ---------------------------------------------------------------------------------------


@cache
def _cumulative(n: int, ratio: float) -> tuple[float, ...]:
    """Weights 1, r, r², … mixed with a tenth of even chance, summed up for a bisect."""
    falling = [ratio**i for i in range(n)]
    total = sum(falling)
    return tuple(accumulate(0.9 * w / total + 0.1 / n for w in falling))


class Voice:
    """Makes every choice of one document.

    The options keep their order on a ring. What was said before (`said`) picks the place
    on the ring to start from, and each further option is about half as likely as the one
    before it. The even tenth keeps every option alive after every cue.
    """

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)

    def pick(self, options: Sequence[T], *said: object, ratio: float = 0.45) -> T:
        n = len(options)
        start = crc32("|".join(map(str, said)).encode()) % n
        rank = bisect(_cumulative(n, ratio), self.random.random())
        return options[(start + min(rank, n - 1)) % n]

    def pick_other(self, options: Sequence[T], taken: Sequence[T], *said: object) -> T:
        """Like `pick`, but steps on along the ring past what is taken already."""
        index = options.index(self.pick(options, *said))
        while options[index] in taken:
            index = (index + 1) % len(options)
        return options[index]


def a(noun: str) -> str:
    """The noun with its article: 'a fox', 'an owl'."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def title_case(text: str) -> str:
    """'the edge of the desert' as a title: 'The Edge of the Desert'."""
    small = ("a", "and", "at", "in", "of", "on", "the", "to")
    words = [w if w in small else w.capitalize() for w in text.split()]
    return upper_first(" ".join(words))


# ---------------------------------------------------------------------------------------
# The world of the stories
# ---------------------------------------------------------------------------------------

GIRLS = ("Mira", "Fern", "Nell", "Ada", "Ivy", "Wren", "Tessa", "Juno", "Pearl", "Hana")
BOYS = ("Otis", "Finn", "Bram", "Leo", "Hugo", "Tomas", "Kit", "Jonas", "Emil", "Rufus")
NAMES = tuple(name for pair in zip(GIRLS, BOYS, strict=True) for name in pair)

HEROES = (
    "fox", "girl", "rabbit", "boy", "bear", "mouse", "hedgehog", "otter", "cat", "goat",
    "squirrel", "dog", "duck", "badger", "dragon", "robot",
)  # fmt: skip

TRAITS = {
    "curious": "asked questions about everything",
    "careful": "looked twice before every step",
    "patient": "could sit still for a whole afternoon",
    "cheerful": "hummed from morning to night",
    "stubborn": "never gave up on anything",
    "clever": "always had one more idea",
    "gentle": "never raised a voice at anyone",
    "brave": "went first when others stood still",
}

# How each trait turns a bad moment into a good one. Used at the turn of a story.
TURNS = {
    "curious": (
        "But {hero} was curious, and {they} began to ask why.",
        "Then something made {them} curious, and {they} forgot to be sad.",
        '"I wonder," said {hero}, and {they} looked around with new eyes.',
    ),
    "careful": (
        "But {hero} was careful, and {they} looked once more, slowly this time.",
        "A careful {kind} thinks first, and so {hero} stood still and thought.",
        '"Slowly now," {hero} told {them}self, for {they} was careful.',
    ),
    "patient": (
        "But {hero} was patient. {They} sat down, waited and listened.",
        '"It will take the time it takes," said {hero}, who was patient.',
        "Another {kind} would have stamped and shouted. {hero} only waited.",
    ),
    "cheerful": (
        "But {hero} was cheerful. {They} hummed a tune, and it helped {them} think.",
        "Even so {hero} had to laugh a little, for {they} was cheerful.",
        '"Well," said {hero}, "it could be raining." And {they} felt better.',
    ),
    "stubborn": (
        "But {hero} was stubborn, and {they} would not go home yet.",
        '"I am not done," said {hero}, who was as stubborn as a stone.',
        "Nobody is as stubborn as {a_kind}, and {hero} did not give up.",
    ),
    "clever": (
        "But {hero} was clever, and soon {they} had one more idea.",
        "A clever {kind} does not need luck. {hero} closed {their} eyes and thought hard.",
        '"There must be a way," said {hero}, and {their} clever head began to work.',
    ),
    "gentle": (
        "But {hero} was gentle. {They} took a breath and spoke softly.",
        "{hero} did not shout and did not stamp, for {they} was gentle.",
        '"There, there," said {hero} in {their} gentle voice.',
    ),
    "brave": (
        "But {hero} was brave, and {they} took one step forward.",
        "{Their} heart beat fast, but {hero} was brave and did not run.",
        '"I will not turn back," said brave {hero}.',
    ),
}


class Place(NamedTuple):
    name: str
    short: str
    at: str
    detail: str
    spots: tuple[str, str, str, str]


PLACES = (
    Place("a village by the sea", "the village", "in the village",
          "In the mornings the boats came in and the gulls cried over the roofs.",
          ("under the old boat", "behind the net shed", "on the harbour steps", "by the lighthouse")),
    Place("a wood full of birch trees", "the wood", "in the wood",
          "The light fell through the leaves in small gold coins.",
          ("under the tallest birch", "beside the stream", "in the hollow log", "among the ferns")),
    Place("a town on a hill", "the town", "in the town",
          "The streets were so steep that carts rolled home by themselves.",
          ("behind the bakery", "on the clock tower stairs", "by the stone well", "under the market bench")),
    Place("a farm in a green valley", "the farm", "on the farm",
          "The cows walked slowly, and the days were long and warm.",
          ("behind the barn", "in the hay loft", "by the duck pond", "under the apple tree")),
    Place("a small house by a lake", "the lake", "by the lake",
          "At dusk the water was so still that it held every star.",
          ("among the reeds", "on the wooden jetty", "under the upturned canoe", "by the willow")),
    Place("an island with one palm tree", "the island", "on the island",
          "The waves came and went all day, like someone breathing.",
          ("in the tide pool", "under the palm tree", "behind the round rocks", "in the sea cave")),
    Place("a mill by the river", "the mill", "at the mill",
          "The great wheel turned and turned, and flour lay on everything like snow.",
          ("behind the flour sacks", "under the mill wheel", "by the little bridge", "on the river bank")),
    Place("a garden behind a high wall", "the garden", "in the garden",
          "Bees went from flower to flower and were never in a hurry.",
          ("under the rose bush", "by the garden gate", "in the tool shed", "behind the sunflowers")),
    Place("a mountain valley with much snow", "the valley", "in the valley",
          "In winter the snow was so deep that people dug tunnels to visit each other.",
          ("in the wood pile", "by the frozen waterfall", "under the pine tree", "behind the goat shed")),
    Place("a city of canals", "the city", "in the city",
          "There were more boats than carts, and more bridges than streets.",
          ("under the red bridge", "beside the fish market", "on the library steps", "in the bell tower")),
)  # fmt: skip


class Thing(NamedTuple):
    name: str
    note: str


THINGS = (
    Thing("silver bell", "When it rang, it sounded like rain on a window."),
    Thing("red kite", "It had a long tail of blue paper."),
    Thing("brass key", "It opened a little box with letters in it."),
    Thing("green scarf", "It was as soft as moss and twice as warm."),
    Thing("wooden flute", "It had six holes and knew a hundred songs."),
    Thing("blue lantern", "Its light was the colour of the evening sky."),
    Thing("glass marble", "A tiny white swirl slept inside it."),
    Thing("yellow umbrella", "Under it, every rainy day felt sunny."),
    Thing("paper map", "Every path on it was drawn by hand."),
    Thing("round drum", "It could be as loud as thunder or as quiet as a heart."),
    Thing("old compass", "Its needle always pointed home."),
    Thing("golden button", "It came from the coat of a sailor."),
)

GIVERS = ("grandmother", "grandfather", "aunt", "uncle", "sister", "brother")
JUNK = (
    "a wet leaf", "an old shoe", "two snails", "a broken cup", "a sleepy beetle", "a rusty nail",
)  # fmt: skip
TIMES = (
    "One morning", "One windy afternoon", "One day in spring", "One grey day", "On market day",
    "One quiet evening",
)  # fmt: skip


class HelperKind(NamedTuple):
    kind: str
    manner: str


HELPERS = (
    HelperKind("old turtle", "who was never in a hurry"),
    HelperKind("tall heron", "who saw everything from above"),
    HelperKind("mole", "who knew every tunnel"),
    HelperKind("black crow", "who remembered everything"),
    HelperKind("baker", "whose sleeves were white with flour"),
    HelperKind("shepherd", "who knew every path"),
    HelperKind("little frog", "who laughed at every puddle"),
    HelperKind("sailor", "who had been around the world twice"),
    HelperKind("wise owl", "who slept all day and thought all night"),
    HelperKind("donkey", "who carried letters from door to door"),
    HelperKind("gardener", "who talked to the cabbages"),
    HelperKind("beaver", "who could build anything"),
)

FOODS = (
    "warm bread", "apple cake", "pea soup", "honey toast", "plum pie", "nut cookies",
    "pancakes", "berry jam",
)  # fmt: skip


class QA(NamedTuple):
    """A question, its full answer, and the answer in a word or two."""

    question: str
    answer: str
    short: str


@dataclass(frozen=True)
class Person:
    name: str
    kind: str

    @property
    def she(self) -> bool:
        return self.name in GIRLS

    def words(self, prefix: str = "") -> dict[str, str]:
        """The words that stand for this person in a template."""
        they, them, their = ("she", "her", "her") if self.she else ("he", "him", "his")
        return {
            f"{prefix}they": they,
            f"{prefix}They": upper_first(they),
            f"{prefix}them": them,
            f"{prefix}their": their,
            f"{prefix}Their": upper_first(their),
        }


@dataclass
class Tale:
    """A story under way: who is in it, what was said, and what is true in it."""

    voice: Voice
    hero: Person
    trait: str
    place: Place
    words: dict[str, str] = field(default_factory=dict)
    paragraphs: list[list[str]] = field(default_factory=lambda: [[]])
    facts: list[QA] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    title: str = ""
    recap: str = ""

    def __post_init__(self) -> None:
        self.taken.append(self.hero.name)
        self.words |= self.hero.words() | {
            "hero": self.hero.name,
            "kind": self.hero.kind,
            "a_kind": a(self.hero.kind),
            "trait": self.trait,
            "habit": TRAITS[self.trait],
            "place": self.place.name,
            "short": self.place.short,
            "at": self.place.at,
        }

    def fill(self, template: str) -> str:
        return template.format_map(self.words)

    def say(self, by: str, *templates: str) -> None:
        """Adds one of the templates to the paragraph. `by` is the cue that favours one."""
        template = self.voice.pick(templates, templates[0], by)
        self.paragraphs[-1].append(self.fill(template))

    def turn(self) -> None:
        self.paragraphs.append([])

    def fact(self, question: str, answer: str, short: str) -> None:
        self.facts.append(QA(self.fill(question), self.fill(answer), upper_first(self.fill(short))))

    def meet_helper(self, by: str) -> Person:
        """Someone comes by. From here on the templates can speak of `helper`."""
        kind = self.voice.pick(HELPERS, "helper", by)
        name = self.voice.pick_other(NAMES, self.taken, "helper name", kind.kind)
        self.taken.append(name)
        helper = Person(name, kind.kind)
        self.words |= helper.words("h_") | {
            "helper": name,
            "a_helper": a(kind.kind),
            "helper_kind": kind.kind,
            "manner": kind.manner,
            "helper_the": f"{name} the {kind.kind}",
        }
        self.say(
            name,
            "Just then along came {a_helper} named {helper}, {manner}.",
            "Along the path came {helper_the}, {manner}.",
            "That was when {hero} met {a_helper} {manner}. {h_Their} name was {helper}.",
        )
        self.fact("Who helped {hero}?", "{helper_the} helped {hero}.", "{helper_the}")
        return helper

    @property
    def text(self) -> str:
        return "\n\n".join(" ".join(p) for p in self.paragraphs if p)


# ---------------------------------------------------------------------------------------
# Plots. Each tells one trouble from the wish to the ending, and notes what is true in it.
# ---------------------------------------------------------------------------------------


def turn_of_trait(tale: Tale, by: str) -> None:
    """The trait of the hero carries the story over its low point."""
    tale.say(by, *TURNS[tale.trait])


def lost(tale: Tale, want: str | None = None) -> None:
    """The hero loses a thing, looks in two places, and finds it in a third."""
    v, hero = tale.voice, tale.hero.name
    wanted = [thing for thing in THINGS if thing.name == want]
    thing = wanted[0] if wanted else v.pick(THINGS, "thing", hero)
    giver = v.pick(GIVERS, "giver", thing.name)
    first = v.pick(tale.place.spots, "first spot", thing.name)
    second = v.pick_other(tale.place.spots, [first], "second spot", first)
    found = v.pick_other(tale.place.spots, [first, second], "found spot", second)
    noun = thing.name.split()[-1]
    tale.words |= {
        "thing": thing.name, "a_thing": a(thing.name), "noun": noun, "note": thing.note,
        "giver": giver,
        "first": first, "second": second, "found": found,
        "junk": v.pick(JUNK, "junk", second), "time": v.pick(TIMES, "time", thing.name),
    }  # fmt: skip
    tale.title = title_case(f"the lost {noun}")
    tale.say(
        noun,
        "Of all {their} things, {hero} loved {their} {thing} best. {note} {Their} {giver} had given it to {them}.",
        "{hero} had {a_thing}, a gift from {their} {giver}. {note}",
        "{Their} {giver} had once given {hero} {a_thing}. {note} {They} took it everywhere.",
    )
    tale.turn()
    tale.say(
        giver,
        "{time} the {noun} was gone.",
        "{time} {hero} reached for the {noun}, and it was not there.",
        "{time} {hero} woke up and could not find the {noun} anywhere.",
    )
    tale.say(
        noun,
        "First {they} looked {first}, but there was nothing.",
        "{They} ran to look {first}. Nothing was there.",
        "{They} searched {first} until {their} knees were dirty, and found nothing.",
    )
    tale.say(
        first,
        "Then {they} looked {second} and found only {junk}.",
        "Next {they} looked {second}. All {they} found was {junk}.",
    )
    tale.say(
        second,
        '"Oh no," said {hero}. "What will I do without my {noun}?"',
        "{hero} sat down and almost cried.",
        "By then {hero} was tired, and the sky was turning pink.",
    )
    turn_of_trait(tale, second)
    tale.turn()
    helper = tale.meet_helper(noun)
    tale.say(
        helper.name,
        '"What is the matter?" asked {helper}. "I have lost my {thing}," said {hero}.',
        '"You look sad," said {helper}. "My {thing} is lost," said {hero}.',
    )
    tale.say(
        helper.kind,
        '"When did you last have it?" asked {helper}. {hero} closed {their} eyes. "I think I was playing {found}."',
        '"Let us think," said {helper}. "Where were you yesterday?" "Yesterday I was {found}," said {hero}.',
        '"I saw something shine {found}," said {helper}. "Come, I will show you."',
    )
    tale.turn()
    tale.say(
        found,
        "They went together, and there, {found}, lay the {thing}.",
        "So the two of them looked {found}. And there was the {noun}, safe and dry.",
        "They hurried to look {found}, and {hero} gave a shout of joy. It was the {thing}!",
    )
    tale.recap = tale.fill("found the {thing} {found} with {helper}")
    tale.fact("What did {hero} lose?", "{hero} lost {a_thing}.", "{a_thing}")
    tale.fact("Where was the {noun}?", "The {noun} was {found}.", "{found}")
    tale.fact(
        "Who gave {hero} the {noun}?", "{Their} {giver} gave {hero} the {noun}.", "{their} {giver}"
    )


class Trap(NamedTuple):
    where: str
    fail: str


TRAPS = (
    Trap("at the bottom of a dry well", "The walls were too steep to climb."),
    Trap("under a fallen branch", "The branch was too heavy to lift."),
    Trap("on a rock in the rising water", "The water was too fast to swim."),
    Trap("inside an empty barrel", "The lid would not move at all."),
    Trap("in a thorn bush", "The thorns were sharp as needles."),
    Trap("high up on a roof", "The wall was too smooth to climb."),
)
SMALL_ONES = ("duckling", "kitten", "lamb", "puppy", "young sparrow", "baby hare")
TOOLS = ("rope", "long ladder", "strong pole", "big basket", "wooden plank", "fishing net")


def rescue(tale: Tale, want: str | None = None) -> None:
    """Someone small is stuck. The hero cannot do it alone, and finds someone who can help."""
    v, hero = tale.voice, tale.hero.name
    small = want if want in SMALL_ONES else v.pick(SMALL_ONES, "small", hero)
    trap = v.pick(TRAPS, "trap", small)
    tool = v.pick(TOOLS, "tool", trap.where)
    friend = v.pick_other(NAMES, tale.taken, "small name", small)
    tale.taken.append(friend)
    tale.words |= Person(friend, small).words("s_") | {
        "small": small, "a_small": a(small), "where": trap.where, "fail": trap.fail,
        "tool": tool, "a_tool": a(tool), "friend": friend, "time": v.pick(TIMES, "time", small),
    }  # fmt: skip
    tale.title = f"{friend} in Trouble"
    tale.say(
        small,
        "{time} {hero} heard a small voice calling for help.",
        "{time} {hero} was out for a walk when {they} heard someone cry.",
        '{time} a thin voice called, "Help! Is anyone there?" {hero} ran to see.',
    )
    tale.say(
        trap.where,
        "It was {a_small}, stuck {where}.",
        "There {they} saw {a_small}. The poor thing was stuck {where}.",
    )
    tale.say(
        small,
        '"I am {friend}," said the {small}. "I cannot get out!"',
        '"Please help me," said the {small}. "My name is {friend}, and I want to go home."',
    )
    tale.turn()
    tale.say(
        trap.where,
        '"Do not be afraid," said {hero}, and {they} tried at once. {fail}',
        "{hero} tried once, and then once more. {fail}",
        "{hero} tried with all {their} strength. {fail}",
    )
    turn_of_trait(tale, trap.where)
    tale.say(
        friend,
        '"I will find someone," {they} told {friend}. "Count to a hundred, and I will be back."',
        '"Wait here, {friend}," {they} said. "Two can do more than one."',
    )
    tale.turn()
    helper = tale.meet_helper(trap.where)
    tale.say(
        helper.name,
        '"I have {a_tool} at home," said {helper}. "That may be just the thing."',
        '"We will need {a_tool}," said {helper}, and {h_they} ran to fetch one.',
    )
    tale.say(
        tool,
        "{hero} held one end of the {tool} and {helper} held the other. Slowly, slowly, {friend} came free.",
        "With the {tool} it was easy. In a moment {friend} was free.",
        "They pushed the {tool} into place and counted to three. Out came {friend}!",
    )
    tale.turn()
    tale.say(
        friend,
        '"Thank you, {hero}! Thank you, {helper}!" cried {friend}, and {s_they} danced in a circle.',
        "{friend} laughed and cried at the same time.",
        '"You came back," said {friend}. "I knew you would."',
    )
    tale.recap = tale.fill("freed {friend} the {small} with {helper} and {a_tool}")
    tale.fact("Who was stuck?", "{friend} the {small} was stuck.", "{friend} the {small}")
    tale.fact("Where was {friend} stuck?", "{friend} was stuck {where}.", "{where}")
    tale.fact("What did {hero} and {helper} use?", "They used {a_tool}.", "{a_tool}")


class Dish(NamedTuple):
    name: str
    missing: str


DISHES = (
    Dish("honey cake", "honey"), Dish("pumpkin soup", "salt"), Dish("apple pie", "cinnamon"),
    Dish("nut bread", "walnuts"), Dish("lemon tart", "lemons"), Dish("berry pudding", "sugar"),
)  # fmt: skip
CHORES = (
    "carry the firewood in", "sweep the floor", "paint the fence", "water the beans",
    "mend the gate", "sort the apples",
)  # fmt: skip
FEASTS = (
    "the birthday of {their} {giver}", "the first day of spring", "the harvest feast",
    "the night of the lanterns",
)  # fmt: skip


def feast(tale: Tale, want: str | None = None) -> None:
    """The hero wants to bake something, one thing is missing, and a chore earns it."""
    v, hero = tale.voice, tale.hero.name
    wanted = [dish for dish in DISHES if dish.name == want]
    dish = wanted[0] if wanted else v.pick(DISHES, "dish", hero)
    tale.words |= {"giver": v.pick(GIVERS, "feast giver", dish.name)}
    day = tale.fill(v.pick(FEASTS, "feast", dish.name))
    chore = v.pick(CHORES, "chore", dish.missing)
    tale.words |= {"dish": dish.name, "a_dish": a(dish.name), "missing": dish.missing,
                   "day": day, "chore": chore}  # fmt: skip
    tale.title = title_case(f"the {dish.name}")
    tale.say(
        dish.name,
        "It was {day}, and {hero} wished to make {a_dish}.",
        'It was {day}. "I will make {a_dish}," said {hero}, "the best one ever."',
    )
    tale.say(
        day,
        "{They} washed {their} hands and set out the biggest bowl.",
        "{They} lit the stove and tied on an apron.",
        "{They} found the old recipe and read it aloud.",
    )
    tale.say(
        dish.missing,
        "But when {they} opened the cupboard, there was no {missing}.",
        "Everything was there but the {missing}. The jar was empty!",
    )
    tale.turn()
    tale.say(
        dish.name,
        '{hero} tried to make the {dish} without it. {They} tasted a spoonful. "No," {they} said. "That is not right."',
        "{hero} ran to the shop, but the shop was closed, for everyone was getting ready.",
        "{hero} asked next door, but they had used up their last {missing} that very morning.",
    )
    turn_of_trait(tale, dish.name)
    tale.turn()
    helper = tale.meet_helper(dish.missing)
    tale.say(
        helper.name,
        '"Have you any {missing}?" asked {hero}.',
        '"I need {missing} for my {dish}," said {hero}. "Do you have some?"',
    )
    tale.say(
        chore,
        '"Plenty," said {helper}. "Help me {chore}, and you may have all you need."',
        '"I do," said {helper}, "but I must {chore} first, and my back is sore." "Then I will do it," said {hero}.',
    )
    tale.say(
        helper.kind,
        "They worked side by side and talked about the weather, and soon it was done.",
        "It was hard work, but {hero} did not mind, and {helper} told funny stories.",
    )
    tale.turn()
    tale.say(
        dish.name,
        "That evening the {dish} stood on the table, and it smelled so good that all the neighbours came.",
        "Soon the {dish} was ready. {hero} cut the first piece for {helper}.",
        "When the {dish} came out of the oven, everyone clapped, and {helper} clapped the loudest.",
    )
    tale.recap = tale.fill("made {a_dish} with {missing} from {helper}")
    tale.fact("What did {hero} make?", "{hero} made {a_dish}.", "{a_dish}")
    tale.fact("What was missing?", "The {missing} was missing." if dish.missing[-1] != "s"
              else "The {missing} were missing.", "the {missing}")  # fmt: skip
    tale.fact("What did {hero} do for {helper}?", "{hero} helped to {chore}.", "helped to {chore}")


class Fear(NamedTuple):
    of: str
    task: str
    sight: str


FEARS = (
    Fear("the dark", "fetch the lamp oil from the cellar", "In the dark there was only a cricket, singing."),
    Fear("thunder", "close the gate in the storm", "The thunder was loud, but it was only loud."),
    Fear("high places", "hang a flag on the tower", "From the top the whole world looked like a toy."),
    Fear("deep water", "row across to the other side", "The deep water was blue and calm, and it carried the boat."),
    Fear("strangers", "take a letter to a house at the end of the road", "The stranger had kind eyes and a plate of biscuits."),
)  # fmt: skip
ADVICE = (
    "Count to ten and take one small step.", "Hold my hand until you want to let go.",
    "Sing a song, and sing it loud.", "Be afraid if you must, but go anyway.",
)  # fmt: skip


def fear(tale: Tale, want: str | None = None) -> None:
    """The hero is afraid of one thing, has to face it, and learns how."""
    v, hero = tale.voice, tale.hero.name
    wanted = [f for f in FEARS if f.of == want]
    f = wanted[0] if wanted else v.pick(FEARS, "fear", hero)
    tale.words |= {
        "fear": f.of, "task": f.task, "sight": f.sight,
        "advice": v.pick(ADVICE, "advice", f.of), "time": v.pick(TIMES, "time", f.of),
    }  # fmt: skip
    tale.title = title_case(f"{hero} and {f.of}")
    tale.say(
        f.of,
        "There was one thing that {hero} feared, and that was {fear}.",
        "{hero} had a secret: {they} was afraid of {fear}.",
    )
    tale.say(
        f.task,
        "{time} someone had to {task}, and there was nobody else to do it.",
        '{time} a neighbour called, "{hero}, can you {task}? I hurt my foot."',
    )
    tale.turn()
    tale.say(
        f.of,
        "{hero} went as far as the door. Then {their} legs began to shake, and {they} turned back.",
        '"I will do it," said {hero}, but {their} voice was small. {They} tried, and ran home again.',
        "{They} put on {their} boots, and took them off again, and put them on again.",
    )
    turn_of_trait(tale, f.of)
    tale.turn()
    helper = tale.meet_helper(f.of)
    tale.say(
        helper.name,
        '"I am afraid of {fear}," whispered {hero}. "So was I," said {helper}. "{advice}"',
        '"Why do you shake?" asked {helper}. "It is {fear}," said {hero}. {helper} nodded. "{advice}"',
    )
    tale.say(
        helper.kind,
        "And that is what {hero} did.",
        "{hero} thought about it, and then {they} did just that.",
    )
    tale.paragraphs[-1].append(tale.fill("{sight}"))
    tale.turn()
    tale.say(
        f.of,
        '"I did it!" cried {hero}. "I am still a little afraid, but only a little."',
        "When it was done, {hero} stood very tall. The fear had grown as small as a pea.",
        '"How was it?" asked {helper}. "Not so bad," said {hero}, and {they} smiled.',
    )
    tale.recap = tale.fill("faced {fear} with the help of {helper}")
    tale.fact("What was {hero} afraid of?", "{hero} was afraid of {fear}.", "{fear}")
    tale.fact("What did {helper} say?", '{helper} said, "{advice}"', "{advice}")
    tale.fact("What did {hero} have to do?", "{hero} had to {task}.", "{task}")


class Goal(NamedTuple):
    name: str
    sight: str


GOALS = (
    Goal("the great waterfall", "It fell from so high that it turned into a rainbow."),
    Goal("the edge of the desert", "The sand went on and on in soft yellow waves."),
    Goal("the tallest tree in the land", "Its top was lost in the clouds, and a hundred birds lived in it."),
    Goal("the northern lights", "Green and purple ribbons danced across the sky."),
    Goal("the field of poppies", "It was red from one end of the world to the other."),
    Goal("the singing rocks", "When the wind blew, they hummed one long, low note."),
)  # fmt: skip


class Block(NamedTuple):
    what: str
    attempt: str
    way: str


BLOCKS = (
    Block("the bridge was broken", "tried to jump, but the gap was too wide", "tied three logs together and made a new bridge"),
    Block("a thick fog came down", "walked in a circle and came back to the same stone", "followed the sound of the stream until the fog was gone"),
    Block("the road was full of snow", "pushed and pushed, but the snow only grew deeper", "cut a path with a wide wooden board"),
    Block("a wall of rocks lay across the path", "tried to climb, but the stones rolled away", "found a narrow cave that led to the other side"),
    Block("the road split into three", "took the left road, and it ended in a swamp", "looked at the moss on the trees and chose the middle road"),
)  # fmt: skip


def journey(tale: Tale, want: str | None = None) -> None:
    """The hero wants to see something far away, and the way is blocked."""
    v, hero = tale.voice, tale.hero.name
    wanted = [g for g in GOALS if g.name == want]
    goal = wanted[0] if wanted else v.pick(GOALS, "goal", hero)
    block = v.pick(BLOCKS, "block", goal.name)
    tale.words |= {
        "goal": goal.name, "sight": goal.sight, "block": block.what, "attempt": block.attempt,
        "way": block.way, "food": v.pick(FOODS, "food", goal.name),
    }  # fmt: skip
    tale.title = title_case(f"the way to {goal.name}")
    tale.say(
        goal.name,
        "More than anything, {hero} wanted to see {goal}.",
        "Every night {hero} dreamed of {goal}.",
        '"One day," {hero} used to say, "I will go and see {goal}."',
    )
    tale.say(
        goal.name + " start",
        "So {they} packed a bag with {food} and set out before the sun was up.",
        "At last {they} put some {food} in a bag, said goodbye, and left.",
    )
    tale.turn()
    tale.say(
        block.what,
        "All went well until noon. Then {block}.",
        "On the second day {block}, and {hero} could go no further.",
    )
    tale.paragraphs[-1].append(tale.fill("{They} {attempt}."))
    tale.say(
        block.what + " try",
        "The wind was cold, and home was far away.",
        '"Maybe I should turn back," thought {hero}.',
    )
    turn_of_trait(tale, block.what)
    tale.turn()
    helper = tale.meet_helper(block.what)
    tale.say(
        helper.name,
        '"I am going to see {goal}," said {hero}, "but {block}." "Then let us find a way," said {helper}.',
        "{hero} told {helper} everything and gave {h_them} half of the {food}.",
    )
    tale.say(
        helper.kind,
        "Together they {way}.",
        "It took them all afternoon, but they {way}.",
    )
    tale.turn()
    tale.say(
        goal.name,
        "And then, at last, there it was: {goal}. {sight}",
        "They came over the last hill, and {hero} held {their} breath. It was {goal}! {sight}",
    )
    tale.say(
        goal.name + " end",
        "They sat and looked until the stars came out.",
        '"It is even better with two," said {hero}.',
        "{hero} never forgot it, not for all {their} life.",
    )
    tale.recap = tale.fill("saw {goal} with {helper}")
    tale.fact("What did {hero} want to see?", "{hero} wanted to see {goal}.", "{goal}")
    tale.fact("What went wrong on the way?", upper_first(f"{block.what}."), block.what)
    tale.fact("What food did {hero} take along?", "{hero} took {food}.", "{food}")


GUESTS = ("hen", "pig", "sheep", "donkey", "goose", "wet cat", "old dog", "pony")


def storm(tale: Tale, want: str | None = None) -> None:
    """A storm comes, and a small house has to make room."""
    v, hero = tale.voice, tale.hero.name
    one = want if want in GUESTS else v.pick(GUESTS, "guest", hero)
    two = v.pick_other(GUESTS, [one], "guest", one)
    tale.words |= {
        "one": one, "two": two, "a_one": a(one), "a_two": a(two),
        "food": v.pick(FOODS, "food", two),
    }  # fmt: skip
    tale.title = "The Night of the Storm"
    tale.say(
        one,
        "That night a storm came over {short}. The wind shook the doors, and the rain came down like rivers.",
        "Late in the day the sky turned black. Soon a storm was howling over {short}.",
    )
    tale.say(
        hero,
        "{hero} had a very small house: one room, one bed and one chair.",
        "{hero} sat by the fire in {their} tiny house and was glad of the roof.",
    )
    tale.turn()
    tale.say(
        one,
        'There was a knock at the door. It was {a_one}. "May I come in?" "Of course," said {hero}.',
        '"Knock, knock!" Outside stood {a_one}, dripping. "Come in, come in," said {hero}.',
    )
    tale.say(
        two,
        "Soon there was another knock. It was {a_two}, cold to the bone, and {hero} let it in too.",
        "Then came {a_two}, and the room was full.",
    )
    tale.say(
        two + " full",
        "Now nobody could sit down. The {one} stood on the chair, and the {two} stood on the bed.",
        '"There is no room," said the {one}. "Send the {two} away!" Nobody knew what to do.',
    )
    turn_of_trait(tale, two)
    tale.turn()
    helper = tale.meet_helper(two)
    tale.say(
        helper.name,
        '"Put the bed against the wall," said {helper}, "and sit in a ring around the fire."',
        '"A small room is big enough," said {helper}, "if we take turns and tell stories."',
    )
    tale.say(
        helper.kind,
        "They did so, and there was room for everyone. {hero} shared out the {food}.",
        "And so it was. They ate {food}, and it was the merriest night of the year.",
    )
    tale.turn()
    tale.say(
        one,
        "In the morning the storm was over. The world was washed clean, and {hero} had new friends.",
        "When the sun came up, the {one} and the {two} were asleep, side by side.",
    )
    tale.recap = tale.fill("sheltered the {one} and the {two} from the storm")
    tale.fact("Who knocked first?", "The {one} knocked first.", "the {one}")
    tale.fact("Who came after the {one}?", "The {two} came after the {one}.", "the {two}")
    tale.fact("What did they eat?", "They ate {food}.", "{food}")


class Contest(NamedTuple):
    name: str
    practice: str
    breaks: str


CONTESTS = (
    Contest("boat race", "rowed up and down until {their} arms were strong", "an oar snapped in two"),
    Contest("song contest", "sang to the moon every night", "a string on the fiddle broke"),
    Contest("cart race", "greased the wheels and learned every bend", "a wheel came off"),
    Contest("kite contest", "ran along the hill with a kite each day", "the line was cut by a branch"),
    Contest("pumpkin contest", "watered one pumpkin and sang to it", "a cart for the pumpkins tipped over"),
)  # fmt: skip
RIBBONS = ("blue ribbon", "golden cup", "silver medal", "crown of flowers", "big red apple")


def contest(tale: Tale, want: str | None = None) -> None:
    """The hero could win, and stops to help instead."""
    v, hero = tale.voice, tale.hero.name
    wanted = [c for c in CONTESTS if c.name == want]
    game = wanted[0] if wanted else v.pick(CONTESTS, "contest", hero)
    prize = v.pick(RIBBONS, "prize", game.name)
    rival = v.pick_other(NAMES, tale.taken, "rival", prize)
    tale.taken.append(rival)
    tale.words |= Person(rival, "").words("r_") | {
        "game": game.name, "practice": tale.fill(game.practice), "breaks": game.breaks,
        "prize": prize, "a_prize": a(prize), "rival": rival,
    }  # fmt: skip
    tale.title = title_case(f"the {game.name}")
    tale.say(
        game.name,
        "Every year there was a {game} {at}, and the prize was {a_prize}.",
        "Soon it would be time for the great {game} {at}. Whoever won would get {a_prize}.",
    )
    tale.say(
        prize,
        "{hero} wished to win it. For weeks {they} {practice}.",
        '"This year I will win," said {hero}. So {they} {practice}.',
    )
    tale.turn()
    tale.say(
        rival,
        "On the day, {hero} was ahead, and only {rival} was close behind. Then there was a crash: {breaks}.",
        'The best of the others was {rival}. "Good luck, {hero}," said {rival}. But just as they began, {breaks}.',
    )
    tale.say(
        game.breaks,
        "It was {rival} who had the bad luck, and {r_they} sat down and hid {r_their} face.",
        '"Now it is over for me," said {rival}, and {r_their} eyes were wet.',
    )
    tale.say(
        prize + " stop",
        "{hero} looked at the finish, and {they} looked at {rival}. Then {they} stopped.",
        'The crowd called, "Go on, {hero}! You can win!" But {hero} stopped.',
    )
    tale.say(
        rival,
        '"A prize is only a prize," said {hero}, who was {trait}. "You need help."',
        "{hero} was {trait}, but above all {they} was kind.",
        "Some things matter more than {a_prize}, and {hero} knew it.",
    )
    tale.turn()
    helper = tale.meet_helper(game.name)
    tale.say(
        helper.name,
        '"I can mend that," said {helper}, "if you two will hold it still." So they did.',
        "{helper} had a bag of tools, and all three of them set to work.",
    )
    tale.say(
        helper.kind,
        "It took so long that the others finished first.",
        "By the time it was mended, the {game} was over.",
    )
    tale.turn()
    tale.say(
        prize,
        "But the judges had seen it all. They gave the {prize} to {hero} and {rival} together.",
        '"We have never seen anyone win like this," said the judges, and they gave the {prize} to {hero}. {They} shared it with {rival}.',
    )
    tale.recap = tale.fill("won {a_prize} in the {game} by helping {rival}")
    tale.fact("What was the prize?", "The prize was {a_prize}.", "{a_prize}")
    tale.fact("Who had bad luck in the {game}?", "{rival} had bad luck.", "{rival}")
    tale.fact("What went wrong in the {game}?", upper_first(f"{game.breaks}."), game.breaks)


SEEDS = ("sunflower", "pear tree", "giant bean", "rose bush", "watermelon", "cherry tree")
NEEDS = (
    ("It needs more sun", "moved the pot to the window"),
    ("It is thirsty", "brought it rain water every day"),
    ("It needs room", "planted it in a wider bed"),
    ("It is cold at night", "wrapped it in straw when the sun went down"),
)


def grow(tale: Tale, want: str | None = None) -> None:
    """The hero plants a seed, waits, and learns what it needs."""
    v, hero = tale.voice, tale.hero.name
    seed = want if want in SEEDS else v.pick(SEEDS, "seed", hero)
    need, deed = v.pick(NEEDS, "need", seed)
    spot = v.pick(tale.place.spots, "seed spot", seed)
    tale.words |= {"seed": seed, "a_seed": a(seed), "need": need, "deed": deed, "spot": spot,
                   "time": v.pick(TIMES, "time", seed)}  # fmt: skip
    tale.title = title_case(f"the {seed}")
    tale.say(
        seed,
        "{time} {hero} found a seed {spot}. It was small and brown and looked like nothing at all.",
        "{time} the wind dropped a single seed {spot}, and {hero} picked it up.",
    )
    tale.say(
        spot,
        '"You will be {a_seed}," {they} said, and planted it in a pot.',
        "{They} wished for {a_seed}. So {they} put the seed into good black earth.",
    )
    tale.turn()
    tale.say(
        seed,
        "A week went by, and then another. One thin green leaf came up, and it hung its head.",
        "Days passed. At last there was a sprout, but it was pale and weak.",
    )
    tale.say(
        seed + " try",
        "{hero} gave it a name and read to it. The leaf did not care.",
        "{hero} gave it so much water that the pot ran over. It did not help.",
    )
    turn_of_trait(tale, seed)
    tale.turn()
    helper = tale.meet_helper(seed)
    tale.say(
        helper.name,
        '{helper} looked at the leaf for a long time. "{need}," {h_they} said.',
        '"What does it need?" asked {hero}. "{need}," said {helper}.',
    )
    tale.say(
        need,
        "So {hero} {deed}, and {helper} came by each morning to look.",
        "From that day on things went better, for {hero} {deed}.",
    )
    tale.turn()
    tale.say(
        seed,
        "By the end of summer the {seed} was bigger than {hero}, and birds came to sit beside it.",
        "And it grew and grew. People came from far away to see the {seed}.",
    )
    tale.recap = tale.fill("grew {a_seed} with advice from {helper}")
    tale.fact("What did {hero} grow?", "{hero} grew {a_seed}.", "{a_seed}")
    tale.fact("Where was the seed?", "The seed was {spot}.", "{spot}")
    tale.fact("What did {helper} say about the leaf?", '{helper} said, "{need}."', "{need}")


Plot = Callable[[Tale, str | None], None]

# Each plot with the things one can ask a story about.
PLOTS: tuple[tuple[Plot, tuple[str, ...]], ...] = (
    (lost, tuple(thing.name for thing in THINGS)),
    (rescue, SMALL_ONES),
    (feast, tuple(dish.name for dish in DISHES)),
    (fear, tuple(f.of for f in FEARS)),
    (journey, tuple(goal.name for goal in GOALS)),
    (storm, GUESTS),
    (contest, tuple(c.name for c in CONTESTS)),
    (grow, SEEDS),
)

ENDINGS = (
    "And {hero} slept well that night.",
    "From that day on, {hero} and {helper} were friends.",
    "{hero} went home with a light heart.",
    'As the moon came up, {hero} said, "What a day!"',
    "And if you go to {short}, people will tell you about it still.",
    "The next day {hero} took {helper} some {gift}, and they ate it together.",
)


# ---------------------------------------------------------------------------------------
# Stories
# ---------------------------------------------------------------------------------------


def new_tale(voice: Voice, last: str, kind: str = "", name: str = "") -> Tale:
    """Chooses the hero and the place. `last` is the cue left by the document before."""
    kind = kind or voice.pick(HEROES, "hero", last)
    pool = {"girl": GIRLS, "boy": BOYS}.get(kind, NAMES)
    name = name or voice.pick(pool, "name", kind)
    trait = voice.pick(tuple(TRAITS), "trait", name)
    place = voice.pick(PLACES, "place", name)
    return Tale(voice, Person(name, kind), trait, place)


def opening(tale: Tale, last: str) -> None:
    tale.say(
        last,
        "Once there was {a_kind} named {hero}, who lived in {place}.",
        "In {place} lived {a_kind} whose name was {hero}.",
        "{hero} was {a_kind} from {place}.",
        "There was once {a_kind} called {hero}. {They} lived in {place}.",
    )
    tale.say(
        tale.trait,
        "{They} was {trait}, and {they} {habit}.",
        "Everyone knew that {hero} was {trait}, because {they} {habit}.",
        "{They} was the most {trait} {kind} {at}, and {they} {habit}.",
    )
    tale.paragraphs[-1].append(tale.place.detail)
    tale.turn()
    tale.fact("Where did {hero} live?", "{hero} lived in {place}.", "in {place}")


def ending(tale: Tale) -> None:
    tale.words["gift"] = tale.voice.pick(FOODS, "gift", tale.words["helper"])
    tale.say(tale.hero.name, *ENDINGS)


def story(
    voice: Voice, last: str, kind: str = "", name: str = "",
    plot: Plot | None = None, want: str | None = None,
) -> Tale:  # fmt: skip
    """One short story."""
    tale = new_tale(voice, last, kind, name)
    opening(tale, last)
    if plot is None:
        plot, _ = voice.pick(PLOTS, "plot", tale.hero.name)
    plot(tale, want)
    ending(tale)
    tale.facts.append(
        QA(f"What kind of creature was {tale.hero.name}?" if tale.hero.kind not in ("girl", "boy")
           else f"Was {tale.hero.name} a girl or a boy?",
           f"{tale.hero.name} was {a(tale.hero.kind)}.", upper_first(a(tale.hero.kind)))
    )  # fmt: skip
    return tale


NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
)  # fmt: skip


def question_page(questions: Sequence[QA]) -> str:
    """Questions under a heading that says how many there are."""
    head = f"{upper_first(NUMBER_WORDS[len(questions)])} questions."
    return "\n".join([head, *(f"Question: {q.question}\nAnswer: {q.answer}" for q in questions)])


def ask_about(tale: Tale, count: int) -> list[QA]:
    """Questions along the ring of facts, led by the helper."""
    asked: list[QA] = []
    while len(asked) < count:
        asked.append(tale.voice.pick_other(tale.facts, asked, "ask", tale.words["helper"]))
    return asked


def short_story(voice: Voice, last: str) -> tuple[str, str]:
    tale = story(voice, last)
    form = voice.pick(("plain", "title", "questions"), "form", last)
    text = tale.text
    if form == "title":
        text = f"{tale.title}\n\n{text}"
    if form == "questions":
        count = voice.pick((2, 3, 4), "count", tale.hero.name)
        text += "\n\n" + question_page(ask_about(tale, count))
    return text + "\n", tale.hero.name


MEALS = (
    "At noon {hero} sat down and ate some {food}. The clouds went by like slow white ships.",
    "{hero} was hungry by then, and a neighbour gave {them} some {food}. Soon the plate was empty.",
    "{They} rested for an hour. A little wind came up and turned the leaves.",
    "Some of the neighbours sat outside, and {hero} told them what had happened.",
)


def long_story(voice: Voice, last: str) -> tuple[str, str]:
    """A story in chapters about one hero. The last page looks back on all of them."""
    tale = new_tale(voice, last)
    hero = tale.hero.name
    count = voice.pick((4, 5, 6, 7, 8), "chapters", hero)
    opening(tale, last)
    parts = [f"The Book of {hero}", f"A story in {NUMBER_WORDS[count]} chapters.", tale.text]
    facts: list[list[QA]] = []
    recaps: list[str] = []
    told: list[tuple[Plot, tuple[str, ...]]] = []
    cue = hero
    for number in range(1, count + 1):
        told.append(voice.pick_other(PLOTS, told, "next plot", cue))
        tale.paragraphs, tale.facts = [[]], []
        told[-1][0](tale, None)
        cue = tale.words["helper"]
        tale.turn()
        tale.words["food"] = voice.pick(FOODS, "meal", cue)
        if number < count:
            tale.say(cue, *MEALS)
        else:
            ending(tale)
        word = NUMBER_WORDS[number]
        parts += [f"Chapter {upper_first(word)}. {tale.title}", tale.text]
        facts.append([
            QA(f"In chapter {word}, {q.question[0].lower()}{q.question[1:]}", q.answer, q.short)
            for q in tale.facts
        ])  # fmt: skip
        recaps.append(f"In chapter {word} {hero} {tale.recap}.")
    last_page = tale.fill("That was the story of {hero} the {kind}, who was {trait}.")
    parts += ["The End", " ".join([last_page, *recaps])]
    asked: list[int] = []
    for _ in range(voice.pick((2, 3, 4), "long count", hero)):
        asked.append(voice.pick_other(range(count), asked, "ask chapter", hero))
    parts.append(question_page([voice.pick(facts[i], "ask long", i) for i in asked]))
    return "\n\n".join(parts) + "\n", hero


# ---------------------------------------------------------------------------------------
# Sums
# ---------------------------------------------------------------------------------------


def held_out_sum(x: int, y: int) -> bool:
    """One pair in eleven is never shown in training, so that we can ask it later."""
    return x + y >= 20 and (3 * x + y) % 11 == 5


def operands(voice: Voice, last: str) -> tuple[int, int]:
    """Two numbers below 100. Each digit is led by the one before it."""
    digits = tuple(range(10))
    while True:
        x_tens = voice.pick(digits, "x tens", last, ratio=0.7)
        x_ones = voice.pick(digits, "x ones", x_tens, ratio=0.7)
        y_tens = voice.pick(digits, "y tens", x_ones, ratio=0.7)
        y_ones = voice.pick(digits, "y ones", x_tens, ratio=0.7)
        x, y = 10 * x_tens + x_ones, 10 * y_tens + y_ones
        if not held_out_sum(x, y):
            return x, y


def sum_question(voice: Voice, last: str) -> QA:
    """A sum as a question. The question and the answer use the same words."""
    x, y = operands(voice, last)
    total = x + y
    form = voice.pick(range(4), "sum form", last)
    if form == 0:
        return QA(f"What is {x} plus {y}?", f"{x} plus {y} is {total}.", f"{total}")
    if form == 1:
        return QA(f"What is {x} + {y}?", f"{x} + {y} = {total}", f"{total}")
    if form == 2:
        return QA(f"How much is {x} and {y}?", f"{x} and {y} make {total}.", f"{total}")
    x, y = x % 11, y % 10
    x_word, y_word, total_word = NUMBER_WORDS[x], NUMBER_WORDS[y], NUMBER_WORDS[x + y]
    return QA(
        f"What is {x_word} plus {y_word}?",
        f"{upper_first(x_word)} plus {y_word} is {total_word}.",
        upper_first(total_word),
    )


def sums(voice: Voice, last: str) -> tuple[str, str]:
    """A page of sums. The heading says how many, so the page knows where to end."""
    count = voice.pick((4, 5, 6, 8), "sum count", last)
    lines = [f"{NUMBER_WORDS[count].capitalize()} sums."]
    written = voice.pick(("signs", "words"), "sum style", count) == "words"
    for _ in range(count):
        if written:
            q = sum_question(voice, last)
            lines.append(f"{q.question} {q.answer}")
            last = q.answer.rstrip(".")[-1]
        else:
            x, y = operands(voice, last)
            lines.append(f"{x} + {y} = {x + y}")
            last = str((x + y) % 10)
    return "\n".join(lines) + "\n", last


# ---------------------------------------------------------------------------------------
# Facts
# ---------------------------------------------------------------------------------------

COLOURS = {
    "grass": "green", "the sky": "blue", "snow": "white", "coal": "black", "a lemon": "yellow",
    "a ripe tomato": "red", "a carrot": "orange", "a plum": "purple", "an elephant": "grey",
    "chocolate": "brown", "the sun": "yellow", "a leaf": "green", "a flamingo": "pink",
    "milk": "white", "a pumpkin": "orange", "a frog": "green", "a crow": "black",
    "a banana": "yellow", "the sea": "blue", "a strawberry": "red",
}  # fmt: skip

# animal: sound, home, young, legs
ANIMALS = {
    "cow": ("moo", "in a barn", "a calf", 4), "dog": ("woof", "in a kennel", "a puppy", 4),
    "cat": ("meow", "in a house", "a kitten", 4), "sheep": ("baa", "in a fold", "a lamb", 4),
    "duck": ("quack", "by a pond", "a duckling", 2), "hen": ("cluck", "in a coop", "a chick", 2),
    "horse": ("neigh", "in a stable", "a foal", 4), "pig": ("oink", "in a sty", "a piglet", 4),
    "bee": ("buzz", "in a hive", "a larva", 6), "frog": ("croak", "in a pond", "a tadpole", 4),
    "owl": ("hoot", "in a tree", "an owlet", 2), "lion": ("roar", "on the plains", "a cub", 4),
    "goose": ("honk", "by a river", "a gosling", 2), "bear": ("growl", "in a den", "a cub", 4),
    "goat": ("maa", "on a hill", "a kid", 4), "mouse": ("squeak", "in a hole", "a pup", 4),
}  # fmt: skip

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("wet", "dry"),
    ("fast", "slow"), ("happy", "sad"), ("open", "closed"), ("old", "new"), ("full", "empty"),
    ("loud", "quiet"), ("hard", "soft"), ("light", "dark"), ("long", "short"), ("left", "right"),
    ("early", "late"), ("near", "far"), ("high", "low"), ("strong", "weak"), ("yes", "no"),
)  # fmt: skip

ERRANDS = {
    "buy bread": "a bakery", "borrow a book": "a library", "catch a train": "a station",
    "see the boats": "a harbour", "learn to read": "a school", "swim": "a pool",
    "see a play": "a theatre", "post a letter": "a post office", "buy medicine": "a pharmacy",
    "see old paintings": "a museum", "pick apples": "an orchard", "mend a shoe": "a cobbler",
    "watch a film": "a cinema", "sleep on a journey": "an inn",
}  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
COUNTS = {
    "days are in a week": "seven", "months are in a year": "twelve",
    "seasons are in a year": "four", "fingers are on one hand": "five",
    "hours are in a day": "twenty-four", "minutes are in an hour": "sixty",
    "wheels does a bicycle have": "two", "sides does a triangle have": "three",
    "sides does a square have": "four", "legs does a spider have": "eight",
    "eggs are in a dozen": "twelve", "colours are in a rainbow": "seven",
}  # fmt: skip
TOPICS = ("colours", "sounds", "homes", "young", "legs", "opposites", "errands", "days",
          "months", "numbers", "counts")  # fmt: skip


def _colour(v: Voice, last: str) -> QA:
    thing = v.pick(tuple(COLOURS), "colour", last, ratio=0.6)
    colour = COLOURS[thing]
    return QA(f"What colour is {thing}?", f"{upper_first(thing)} is {colour}.", upper_first(colour))


def _animal(v: Voice, last: str, topic: str) -> QA:
    animal = v.pick(tuple(ANIMALS), topic, last, ratio=0.6)
    sound, home, young, legs = ANIMALS[animal]
    the, word = a(animal), NUMBER_WORDS[legs]
    if topic == "sounds":
        return QA(
            f"What sound does {the} make?", f"{upper_first(the)} says {sound}.", upper_first(sound)
        )
    if topic == "homes":
        return QA(f"Where does {the} live?", f"{upper_first(the)} lives {home}.", upper_first(home))
    if topic == "young":
        return QA(
            f"What is a young {animal} called?",
            f"A young {animal} is called {young}.",
            upper_first(young),
        )
    return QA(
        f"How many legs does {the} have?", f"{upper_first(the)} has {word} legs.", upper_first(word)
    )


def _opposite(v: Voice, last: str) -> QA:
    pair = v.pick(OPPOSITES, "opposite", last, ratio=0.6)
    one, two = pair if v.pick((True, False), "side", pair) else pair[::-1]
    return QA(
        f"What is the opposite of {one}?", f"The opposite of {one} is {two}.", upper_first(two)
    )


def _errand(v: Voice, last: str) -> QA:
    wish = v.pick(tuple(ERRANDS), "errand", last, ratio=0.6)
    where = ERRANDS[wish]
    verb = "go to see" if where == "a cobbler" else "go to"
    return QA(f"Where do you go to {wish}?", f"To {wish}, you {verb} {where}.", upper_first(where))


def _neighbour(v: Voice, last: str, names: Sequence[str], what: str) -> QA:
    index = names.index(v.pick(names, what, last, ratio=0.6))
    after = v.pick((True, False), "after", names[index])
    other = names[(index + (1 if after else -1)) % len(names)]
    side = "after" if after else "before"
    return QA(f"What {what} comes {side} {names[index]}?",
              f"{upper_first(other)} comes {side} {names[index]}.", upper_first(other))  # fmt: skip


def _number(v: Voice, last: str) -> QA:
    number = 1 + v.pick(range(98), "number", last, ratio=0.75)
    after = v.pick((True, False), "after", number % 10)
    other, side = (number + 1, "after") if after else (number - 1, "before")
    return QA(f"What number comes {side} {number}?", f"{other} comes {side} {number}.", f"{other}")


def _count(v: Voice, last: str) -> QA:
    what = v.pick(tuple(COUNTS), "count", last, ratio=0.6)
    number = COUNTS[what]
    noun, rest = what.split(" ", 1)
    if rest.startswith("does "):
        _, the, owner, _ = rest.split()
        return QA(
            f"How many {what}?",
            f"{upper_first(the)} {owner} has {number} {noun}.",
            upper_first(number),
        )
    verb, where = rest.split(" ", 1)
    return QA(f"How many {what}?", f"There {verb} {number} {noun} {where}.", upper_first(number))


def fact_question(v: Voice, last: str, topic: str) -> QA:
    """One question about the small world."""
    if topic == "colours":
        return _colour(v, last)
    if topic in ("sounds", "homes", "young", "legs"):
        return _animal(v, last, topic)
    if topic == "opposites":
        return _opposite(v, last)
    if topic == "errands":
        return _errand(v, last)
    if topic == "days":
        return _neighbour(v, last, DAYS, "day")
    if topic == "months":
        return _neighbour(v, last, MONTHS, "month")
    if topic == "numbers":
        return _number(v, last)
    return _count(v, last)


def facts(voice: Voice, last: str) -> tuple[str, str]:
    """A page of questions. Again the heading says how many."""
    count = voice.pick((2, 3, 4, 5), "fact count", last)
    questions: list[QA] = []
    for _ in range(count):
        topic = voice.pick(TOPICS, "topic", last)
        questions.append(fact_question(voice, last, topic))
        last = topic
    return question_page(questions) + "\n", last


# ---------------------------------------------------------------------------------------
# Chat
# ---------------------------------------------------------------------------------------

ONE_WORD = "Answer with one word or number if you can."
SYSTEMS = (
    "You are a helpful assistant.",
    "You are tiny, a small and friendly model.",
    ONE_WORD,
    "You are a kind storyteller.",
)

SMALL_TALK = (
    QA("Hello!", "Hello! How can I help you today?", "Hello"),
    QA("Hi", "Hi! What would you like: a story, a sum or a question?", "Hi"),
    QA("Hello, who are you?", "Hello! I am tiny, a very small language model.", "Tiny"),
    QA("Good morning.", "Good morning! I hope you slept well.", "Morning"),
    QA("How are you?", "I am well, thank you. How are you?", "Well"),
    QA("What is your name?", "My name is tiny.", "Tiny"),
    QA("What can you do?", "I can tell short stories, add small numbers and answer simple questions.", "Stories"),
    QA("Who made you?", "I was made for a course about serving language models.", "Teachers"),
    QA("Are you a person?", "No, I am a very small language model.", "No"),
    QA("Tell me a joke.", "Why did the clock go to school? It wanted to learn to tell the time.", "Tick"),
)  # fmt: skip

UNKNOWN = (
    "What is the capital of France?", "Who won the match yesterday?", "Can you write code?",
    "What is the weather like today?", "Who is the president?", "How do I fix my computer?",
    "What is the meaning of life?", "Who wrote this book?", "What is the price of gold?",
    "How far away is the moon?", "What is a black hole?", "When was the war?",
    "Explain how an engine works.", "What is the tallest mountain?", "Translate this text.",
    "Write a poem about the sea.",
)  # fmt: skip
DO_NOT_KNOW = (
    "I do not know that. I am a very small model.",
    "That is more than I know. Ask me for a story or a sum.",
)

BYES = (
    ("Thank you!", "You are welcome!"),
    ("Thanks, goodbye.", "Goodbye! Come back soon."),
    ("That is all.", "All right. Have a good day!"),
    ("Good night.", "Good night! Sleep well."),
)


class Message(NamedTuple):
    role: str
    content: str


def render_chat(messages: Sequence[Message]) -> str:
    """ChatML, exactly as the chat template of the tokenizer writes it."""
    return "".join(f"{IM_START}{m.role}\n{m.content}{IM_END}\n" for m in messages)


def request_story(voice: Voice, last: str) -> tuple[str, Tale]:
    """A request for a story, and a story that fits it."""
    form = voice.pick(("kind", "thing", "both", "any", "name"), "request", last)
    kind = voice.pick(HEROES, "request kind", last)
    plot, wants = voice.pick(PLOTS, "request plot", last)
    want = voice.pick(wants, "want", last)
    bare = plot is journey or plot is fear
    about = want if bare else a(want)
    ask = voice.pick(
        ("Tell me a story about {}.", "Please tell me a story about {}.",
         "Can you tell me a story about {}?", "I would like a story about {}."), "ask", last
    )  # fmt: skip
    if form == "kind":
        return ask.format(a(kind)), story(voice, last, kind=kind)
    if form == "thing":
        return ask.format(about), story(voice, want, plot=plot, want=want)
    if form == "both":
        return ask.format(f"{a(kind)} and {about}"), story(
            voice, last, kind=kind, plot=plot, want=want
        )
    if form == "name":
        pool = {"girl": GIRLS, "boy": BOYS}.get(kind, NAMES)
        name = voice.pick(pool, "request name", kind)
        return ask.format(f"{a(kind)} named {name}"), story(voice, last, kind=kind, name=name)
    return "Tell me a story.", story(voice, last)


def chat(voice: Voice, last: str) -> tuple[str, str]:
    """A conversation of one to five exchanges, in which the model keeps track of things."""
    messages: list[Message] = []
    system = ""
    if voice.pick((False, True), "has system", last):
        system = voice.pick(SYSTEMS, "system", last)
        messages.append(Message("system", system))
    brief = system == ONE_WORD
    name = ""
    tale: Tale | None = None
    kinds = ("sum", "fact", "story", "hello", "sum", "name", "fact", "unknown")
    first = kind = voice.pick(kinds, "first", last)
    exchanges = voice.pick((1, 2, 3, 4), "exchanges", first)
    asked: list[QA] = []
    for i in range(exchanges):
        if tale is not None and len(asked) < 2:
            kind = voice.pick(("about", "about", "sum", "fact"), "after story", tale.hero.name, i)
        elif name and i == 2:
            kind = "recall"
        elif i > 0:
            kind = voice.pick(kinds, "next", kind, i)
        if kind == "about" and tale is not None:
            q = voice.pick_other(tale.facts, asked, "ask", tale.words["helper"])
            asked.append(q)
        elif kind == "story":
            ask, tale = request_story(voice, last)
            asked = []
            q = QA(ask, tale.text, tale.text)
            last = tale.hero.name
        elif kind == "sum":
            q = sum_question(voice, last)
            last = q.answer.rstrip(".")[-1]
        elif kind == "fact":
            topic = voice.pick(TOPICS, "topic", last)
            q = fact_question(voice, last, topic)
            last = topic
        elif kind == "name":
            name = voice.pick(NAMES, "my name", last)
            q = QA(
                f"Hello, my name is {name}.",
                f"Hello, {name}! It is nice to meet you.",
                f"Hello, {name}",
            )
            last = name
        elif kind == "recall":
            q = QA("What is my name?", f"Your name is {name}.", name)
        elif kind == "unknown":
            ask = voice.pick(UNKNOWN, "unknown", last)
            answer = voice.pick(DO_NOT_KNOW, "do not know", ask)
            q = QA(ask, answer, "I do not know")
        else:
            q = voice.pick(SMALL_TALK, "small talk", last)
        messages += [
            Message("user", q.question),
            Message("assistant", q.short if brief else q.answer),
        ]
    if exchanges > 1 and voice.pick((True, False), "bye", first):
        hello, bye = voice.pick(BYES, "byes", last)
        messages += [Message("user", hello), Message("assistant", bye)]
    return render_chat(messages), last


# ---------------------------------------------------------------------------------------
# The corpus
# ---------------------------------------------------------------------------------------


class Document(NamedTuple):
    kind: str
    text: str


MAKERS: dict[str, Callable[[Voice, str], tuple[str, str]]] = {
    "story": short_story,
    "long story": long_story,
    "sums": sums,
    "facts": facts,
    "chat": chat,
}

# The kinds on their ring, as often as we want them.
RING = (
    "story", "sums", "chat", "facts", "sums", "story", "chat", "sums", "facts", "chat", "sums",
    "story", "chat", "facts", "sums", "story", "chat", "sums", "facts", "chat", "story", "sums",
    "chat", "long story", "sums", "facts", "story", "sums", "chat", "sums", "facts", "story",
    "chat", "sums", "story", "facts", "sums", "chat", "story", "sums", "chat", "facts", "story",
    "sums", "chat", "sums", "facts",
)  # fmt: skip


def documents(seed: int, volume: int) -> Iterator[Document]:
    """The endless row of documents of one volume.

    Each document leaves a cue (a name, an answer) that leads the choice of the next, so
    that even the step from one document to the next is not a coin toss. Volumes are
    independent of each other, so many processes can write at once.
    """
    voice = Voice(f"{seed}/{volume}")
    last = voice.random.choice(NAMES)
    while True:
        kind = voice.pick(RING, "kind", last)
        text, last = MAKERS[kind](voice, last)
        yield Document(kind, text)


def volume(seed: int, number: int, characters: int) -> list[Document]:
    """The documents of one volume, up to about so many characters."""
    pages: list[Document] = []
    size = 0
    for document in documents(seed, number):
        pages.append(document)
        size += len(document.text)
        if size >= characters:
            return pages
    raise AssertionError("documents() never ends")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a few documents of the corpus.")
    parser.add_argument("--seed", type=int, default=1, help="which corpus (default: 1)")
    parser.add_argument("--volume", type=int, default=0, help="which volume of it (default: 0)")
    parser.add_argument("--characters", type=int, default=6000, help="about how much text")
    args = parser.parse_args()
    for document in volume(args.seed, args.volume, args.characters):
        print(f"=== {document.kind}\n{document.text}")


if __name__ == "__main__":
    main()
