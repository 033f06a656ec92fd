"""What methods of `Ratings` compute: ages of entries, labels and entries at positions."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import numpy as np

from ..core.validate import check_real
from .text import parse_dates


def ages_of(times: np.ndarray, half_life: Any, now: Any) -> np.ndarray:
    """Ages in half-lives, float64."""
    if not len(times):
        return np.zeros(0)
    if times.dtype.kind == "M":
        if not isinstance(half_life, (timedelta, np.timedelta64)):
            raise TypeError(
                f"half_life must be a timedelta, since timestamps are dates, got {half_life!r} of type "
                f"{type(half_life).__name__}; for example numpy.timedelta64(30, 'D')"
            )
        unit = np.timedelta64(1, "us")
        try:
            length = float(np.timedelta64(half_life) / unit)
        except TypeError as error:  # of months and years
            raise TypeError(f"half_life must have a fixed length, such as days, got {half_life!r}") from error
        check_real("half_life in microseconds", length, 0.0, strict=True)
        latest = times.max() if now is None else _date(now)
        ages = (latest.astype("M8[us]") - times.astype("M8[us]")) / unit
    else:
        if isinstance(half_life, (timedelta, np.timedelta64)):
            raise TypeError(
                f"half_life must be a number in the unit of timestamps, which are numbers, got {half_life!r}; for Unix "
                "times, its seconds"
            )
        if are_calendar_dates(times):
            raise ValueError(
                f"timestamps are numbers that look like dates ({times.min()} to {times.max()}), whose differences are "
                "no ages: convert them, such as pandas.to_datetime(column.astype(str)), before from_frame or from_coo"
            )
        length = check_real("half_life", half_life, 0.0, strict=True)
        latest = times.max() if now is None else check_real("now", now)
        ages = (latest - times).astype(np.float64)
    later = int(np.count_nonzero(ages < 0))
    if later:
        raise ValueError(
            f"now={now!r} is before {later:,} of {len(times):,} timestamps, the latest of which is {times.max()}"
        )
    return np.asarray(ages / length)


def are_calendar_dates(times: np.ndarray) -> bool:
    """Whether numbers are all dates such as 20240105, of 1900 to 2099."""
    if times.dtype.kind != "i" or times.min() < 19_000_101 or times.max() > 20_991_231:
        return False
    month, day = times // 100 % 100, times % 100
    return bool(np.all((month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)))


def _date(now: Any) -> np.datetime64:
    """A date, or its text, in UTC."""
    try:
        if not isinstance(now, (np.datetime64, date, str)):
            raise TypeError(f"type {type(now).__name__}")
        return now if isinstance(now, np.datetime64) else parse_dates([now])[0]
    except (TypeError, ValueError) as error:
        raise TypeError(f"now must be a date, since timestamps are dates, got {now!r} ({error})") from error


def labels_at(ids: np.ndarray | None, positions: np.ndarray) -> np.ndarray:
    """Labels of positions; strings as objects, so that repeated ones share memory."""
    if ids is None:
        return positions
    return ids.astype(object)[positions] if ids.dtype.kind == "U" else ids[positions]


def axis_key(key: Any) -> Any:
    """Key of the first axis; scikit-learn passes ``(rows, ...)``."""
    if isinstance(key, tuple) and len(key) == 2 and key[1] is Ellipsis:
        return key[0]
    if key is None or isinstance(key, tuple) or np.ndim(key) > 1:
        raise TypeError("ratings are indexed by users alone: integers, a slice or a mask")
    return list(key) if isinstance(key, range) else key
