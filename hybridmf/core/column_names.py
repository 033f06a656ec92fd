"""Names of columns in public data sets."""

from __future__ import annotations

import re
from typing import Any


def _spellings(nouns: str, endings: str) -> set[str]:
    return {noun + ending for noun in nouns.split() for ending in ["", *endings.split()]}


_KEYS = "s id ids key idx index no num nr number code uuid hash"
_USER_NOUNS = (
    "user member customer cust visitor reader reviewer listener viewer player client subscriber buyer shopper "
    "consumer person rater critic household learner student"
)
_ITEM_NOUNS = (
    "item movie film book product artist track song album business anime manga game app article video recipe joke "
    "restaurant hotel beer wine course podcast"
)
_ITEM_KEYS = "news location place poi venue title show series job post page channel playlist merchant food paper repo"
_VALUES = (
    "rating ratings rate score scores star stars value values weight weights count counts play plays playcount "
    "plays listens listencount playtime hours hoursplayed preference preferences pref prefs interaction interactions "
    "overall reviewoverall reviewscore reviewrating ratingvalue ratingscore ratingcount myscore myrating quantity qty "
    "clicks clickcount views viewcount visits visitcount checkins purchases purchasecount watchratio strength "
    "confidence frequency feedback label response grade"
)
_TIMES = (
    "timestamp time date datetime ts unix unixtime unixtimestamp unixreviewtime reviewtime reviewdate reviewtimestamp "
    "ratingtime ratingdate ratingtimestamp createdat created datecreated updatedat dateadded addedat eventtime "
    "eventtimestamp checkintime invoicedate orderdate purchasedate lastplayed when day"
)

ROLES: dict[str, str] = {
    **dict.fromkeys(("", "index", "unnamed0", "rowid", "rownumber"), "row"),
    **dict.fromkeys(_TIMES.split(), "time"),
    **dict.fromkeys(_VALUES.split(), "value"),
    **dict.fromkeys((f"{noun}{word}" for noun in _ITEM_NOUNS.split() for word in ("rating", "score")), "value"),
    **dict.fromkeys(("userrating", "userscore", "starrating", "artistplays", "trackplays", "songplays"), "value"),
    **dict.fromkeys(_spellings(_ITEM_NOUNS, _KEYS), "item"),
    **dict.fromkeys(_spellings(_ITEM_KEYS, _KEYS) - set(_ITEM_KEYS.split()), "item"),
    **dict.fromkeys(("iid", "isbn", "isbn10", "isbn13", "asin", "parentasin", "sku", "stockcode"), "item"),
    **dict.fromkeys(("beerbeerid", "appname", "artistmbid", "trackmbid"), "item"),
    **dict.fromkeys(_spellings(_USER_NOUNS, _KEYS + " name"), "user"),
    **dict.fromkeys(("uid", "steamid", "authorsteamid", "reviewprofilename", "usersha1"), "user"),
}
"""Role of a column by its name in lower case, with only letters and digits.

The spellings are those of MovieLens, goodbooks, Goodreads, Book-Crossing, Last.fm, Million Song, Amazon, Steam, Yelp,
Netflix, Gowalla, MyAnimeList, BeerAdvocate, RetailRocket, KuaiRec and others; "row" is the number of a row.
"""


def role_of(name: Any) -> str | None:
    """Role of a column with that name: "user", "item", "value", "time" or "row"; None for any other name."""
    if not isinstance(name, str):
        return None
    plain = re.sub(r":(?:token|float)(?:_seq)?$", "", name.strip().lower())  # RecBole writes user_id:token
    return ROLES.get(re.sub(r"[\W_]", "", plain))
