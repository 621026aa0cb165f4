"""The word lists that all tasks draw from: one small lexicon, so that a small model sees every word often."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Mia Tom Ana Ben Eva Leo Zoe Max Ida Sam Lily Omar "
    "Nina Paul Ruth Hugo Jane Karl Lena Noah Rosa Amir Vera Yuki"
)
PLACES = _words("Oslo Rome Paris Lima Cairo Delhi Tokyo Berlin Madrid Quito Dublin Milan")
COLOURS = _words("red blue green black white pink gold brown grey purple orange silver")
ANIMALS = _words("owl fox cat dog horse goat duck bear wolf frog lion mouse")
THINGS = _words("book lamp chair coin box pen cup key ball ring card map clock stone shell kite")
FOODS = _words("rice bread soup cheese apples plums fish cake beans eggs pears corn")
JOBS = _words("baker pilot nurse judge clerk farmer painter singer")
PLURALS = _words(
    "books lamps chairs coins boxes pens cups keys balls rings cards maps clocks stones shells kites"
)
