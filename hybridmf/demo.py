"""The demonstration: invented films with planted taste, models trained on them, and a report in plain text.

Nothing is downloaded. `generate` draws a data set whose structure is known, so the report can say whether the models found it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._validate import check_int

# Title words of each genre: every subject meets every ending, which gives 1,600 different titles.
GENRES: dict[str, tuple[str, str]] = {
    "Science fiction": (
        "Comet,Android,Nebula,Starship,Quasar,Colony,Reactor,Signal,Orbit,Probe",
        "of Titan,beyond Mars,in Sector Nine,at Light Speed,from the Iron Moon,of the Eleventh Planet,without Gravity,"
        "under Two Suns,and the Machine,in Cold Sleep,of the Last Engineer,outside Time,on Platform Six,for Robots,"
        "at Station Delta,of Glass",
    ),
    "Romance": (
        "Letters,Kisses,Summer,Promises,Roses,Wedding,Heartbeats,Dances,Secrets,Autumn",
        "in Lisbon,for Clara,by the Lake,under the Linden,from Vienna,and Champagne,of the Florist,at First Snow,"
        "for Two,on the Balcony,in Old Handwriting,on Sunrise Avenue,of Miss Amelie,in Waltz Time,without Goodbye,"
        "across the Bay",
    ),
    "Crime": (
        "Murder,Alibi,Evidence,Ransom,Witness,Inspector,Heist,Poison,Verdict,Blackmail",
        "on Dock Street,in the Archive,after Midnight,of Inspector Voss,at the Bank,without Motive,in Cell Eleven,"
        "at the Opera,on the Night Train,for the Jury,of the Twin Brothers,in Broad Daylight,behind the Wall,"
        "of the Silent Partner,on Tape,at Pier Forty",
    ),
    "Comedy": (
        "Uncle,Holiday,Neighbours,Goat,Butler,Picnic,Mayor,Wig,Parrot,Plumber",
        "in Trouble,and the Pudding,on Strike,without Trousers,by Mistake,next Door,and a Half,of the Year,"
        "at the Wrong Hotel,in Pyjamas,for Sale,and the Tuba,gone Fishing,on a Diet,with Extra Cheese,"
        "and the Missing Sofa",
    ),
    "Horror": (
        "Cellar,Shadows,Scarecrow,Whispers,Crypt,Mirror,Fog,Puppet,Coffin,Mask",
        "of Blackmoor,in the Attic,that Breathes,after Dark,under the Floor,of Old Mother Crane,with No Face,"
        "at the Window,of the Drowned,on Hollow Hill,in Ward Thirteen,of Teeth,that Waits,behind the Door,"
        "of the Red Nursery,at Candle End",
    ),
    "Western": (
        "Saddle,Sheriff,Canyon,Stagecoach,Outlaw,Rifle,Mustang,Frontier,Saloon,Gold",
        "of Dry Creek,from Abilene Pass,at Noon Ridge,in the Dust,for Nine Dollars,of the Lone Pine,without Law,"
        "at Sundown,of Copper Gulch,on the Ridge,for Hire,beyond the Pecan River,of Jeb Harlow,and the Preacher,"
        "in Red Valley,of Broken Spur",
    ),
    "Documentary": (
        "Glaciers,Bees,Bridges,Volcanoes,Rivers,Bread,Lighthouses,Whales,Deserts,Clocks",
        "of the North,and Us,in Numbers,through the Seasons,from Above,in Danger,by Hand,of the World,in Slow Motion,"
        "and Their Keepers,in Close-up,of Today,in a Hundred Objects,after the Ice,at Work,of the Old Continent",
    ),
    "Fantasy": (
        "Dragon,Wizard,Crown,Sword,Oracle,Unicorn,Goblins,Rune,Griffin,Sorceress",
        "of Eldermere,and the Seven Keys,of the Silver Wood,in Exile,of Ember Hall,without a Name,of the Hidden Isle,"
        "and the Riddle,of Winter's Gate,beneath the Mountain,of Thorn and Ash,of the Long Night,and the Apprentice,"
        "of Mirrordeep,in Stone,of the Third Age",
    ),
    "War": (
        "Regiment,Trenches,Convoy,Bunker,Siege,Radio,Medic,Barrage,Airfield,Ceasefire",
        "at Dawn,of the Ninth Army,in the Snow,on Hill Thirty,behind the Lines,of Brothers,without Orders,"
        "across the Channel,in Silence,of the Lost Battalion,at the Border,under Fire,on the Eastern Road,"
        "of Forgotten Men,at Fort Lindel,in November",
    ),
    "Animation": (
        "Hedgehog,Penguins,Teapot,Snail,Robot Kitten,Balloon,Otter,Firefly,Cloud,Beetle",
        "and Friends,in the City,goes to School,on Wheels,and the Paper Moon,in Wonder Woods,saves Breakfast,"
        "of Marzipan Hill,learns to Fly,and the Tiny King,in Socks,of Jelly Bay,sings Again,and the Giant,"
        "in Space Boots,of Button Town",
    ),
}

GENRE_NAMES = tuple(GENRES)

# Each taste group likes two genres and dislikes a third; users of one group agree with each other, not perfectly.
TASTE_GROUPS = (
    ("Science fiction", "Fantasy", "Romance"),
    ("Romance", "Comedy", "War"),
    ("Crime", "Horror", "Animation"),
    ("Western", "War", "Science fiction"),
    ("Documentary", "Crime", "Fantasy"),
    ("Animation", "Fantasy", "Horror"),
    ("Comedy", "Western", "Documentary"),
    ("Documentary", "Romance", "Western"),
    ("Science fiction", "Horror", "Comedy"),
    ("War", "Crime", "Animation"),
)


@dataclass(frozen=True)
class Films:
    """The generated data set with the structure that was planted in it.

    Attributes
    ----------
    users, items : int array, shape (nnz,)
        Who rated what; sorted by user, then item.
    values : float32 array, shape (nnz,)
        Ratings 1 to 5.
    titles : list of str, length n_items
    item_genres : bool array, shape (n_items, n_genres)
        One or two genres an item.
    liked_genres : bool array, shape (n_users, n_genres)
        The two genres of the user's taste group.
    """

    users: np.ndarray
    items: np.ndarray
    values: np.ndarray
    titles: list[str]
    item_genres: np.ndarray
    liked_genres: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """(n_users, n_items)."""
        return len(self.liked_genres), len(self.titles)

    def genre_text(self, item: int) -> str:
        """Genres of one item, e.g. ``"Crime, Horror"``."""
        return ", ".join(name for name, has in zip(GENRE_NAMES, self.item_genres[item], strict=True) if has)

    def taste_text(self, user: int) -> str:
        """Genres one user likes, e.g. ``"Crime and Horror"``."""
        return " and ".join(name for name, likes in zip(GENRE_NAMES, self.liked_genres[user], strict=True) if likes)


def generate(n_users: int = 4000, n_items: int = 1500, seed: int = 0) -> Films:
    """Invented films and their ratings, the same for the same seed.

    A rating is 3.3 + the user's mood + the film's quality + how well its genres match the user's taste + noise, rounded
    and kept in 1..5. Popularity falls with rank as a power law, and users pick what they expect to like, so the ratings
    are missing not at random, as in real data.

    Parameters
    ----------
    n_users : int
        At least 1.
    n_items : int
        1 to 1,600, the number of titles there are words for.
    seed : int
        At least 0.

    Returns
    -------
    Films

    Raises
    ------
    TypeError, ValueError
        An argument is no integer or out of range.
    """
    check_int("n_users", n_users, 1)
    check_int("n_items", n_items, 1, MOST_TITLES)
    rng = np.random.default_rng(check_int("seed", seed, 0))
    titles, item_genres = _draw_films(n_items, rng)
    group = rng.integers(len(TASTE_GROUPS), size=n_users)
    taste = _group_taste()[group] + rng.normal(0.0, 0.2, (n_users, len(GENRE_NAMES)))
    affinity = (taste @ (item_genres / item_genres.sum(axis=1, keepdims=True)).T).astype(np.float32)
    quality = rng.normal(0.0, 0.35, n_items)
    popularity = 1.0 / (1.0 + rng.permutation(n_items)) ** 0.7
    users, items = _draw_pairs(affinity, np.log(popularity) + 0.5 * quality, rng)
    mood = rng.normal(0.0, 0.35, n_users)
    expected = 3.3 + mood[users] + quality[items] + 1.1 * affinity[users, items]
    values = np.clip(np.rint(expected + rng.normal(0.0, 0.6, len(users))), 1, 5).astype(np.float32)
    return Films(users, items, values, titles, item_genres, _group_taste()[group] > 0)


def _draw_films(n_items: int, rng: np.random.Generator) -> tuple[list[str], np.ndarray]:
    """Titles and genres; the title's words come from the first genre, and one film in four has a second."""
    pairs = [(genre, title) for genre, name in enumerate(GENRE_NAMES) for title in _titles(name)]
    chosen = rng.permutation(len(pairs))[:n_items]
    item_genres = np.zeros((n_items, len(GENRE_NAMES)), dtype=bool)
    item_genres[np.arange(n_items), [pairs[k][0] for k in chosen]] = True
    mixed = np.flatnonzero(rng.random(n_items) < 0.25)
    item_genres[mixed, rng.integers(len(GENRE_NAMES), size=len(mixed))] = True
    return [pairs[k][1] for k in chosen], item_genres


def _titles(genre: str) -> list[str]:
    subjects, endings = (words.split(",") for words in GENRES[genre])
    return [f"{subject} {ending}" for subject in subjects for ending in endings]


MOST_TITLES = sum(len(_titles(name)) for name in GENRE_NAMES)


def _group_taste() -> np.ndarray:
    """Taste of each group, shape (n_groups, n_genres): 1 for liked genres, -1 for the disliked one, else 0."""
    taste = np.zeros((len(TASTE_GROUPS), len(GENRE_NAMES)))
    for row, (first, second, disliked) in enumerate(TASTE_GROUPS):
        taste[row, [GENRE_NAMES.index(first), GENRE_NAMES.index(second)]] = 1.0
        taste[row, GENRE_NAMES.index(disliked)] = -1.0
    return taste


def _draw_pairs(
    affinity: np.ndarray, item_appeal: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Which films each user has rated: a draw without replacement, more likely the more popular and the better liked."""
    n_users, n_items = affinity.shape
    # Few users rate much, most rate little: log-normal counts.
    counts = np.clip(rng.lognormal(np.log(45.0), 0.6, n_users), 12, n_items // 3).astype(np.int64)
    appeal = 2.2 * affinity + item_appeal.astype(np.float32)
    appeal += rng.gumbel(size=appeal.shape).astype(np.float32)  # the largest sums are a draw without replacement
    order = np.argsort(-appeal, axis=1)
    taken = np.arange(n_items)[None, :] < counts[:, None]
    users = np.repeat(np.arange(n_users), counts)
    items = order[taken]
    by_pair = np.lexsort((items, users))
    return users[by_pair], items[by_pair]
