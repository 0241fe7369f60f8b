"""The wide normalisation of answers: one spelling for what Unicode, numbers and dates write in several ways."""

from __future__ import annotations

import datetime
import re
import unicodedata

_ARTICLES = frozenset({"a", "an", "the"})

# What compatibility normalisation would turn into a space and a mark, or take for a letter.
_APOSTROPHES = dict.fromkeys((0x60, 0xB4, 0x2BC, 0x2018, 0x2019, 0x2032), "'")
_LETTERS = {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i"}
_DASHES = dict.fromkeys(map(chr, (*range(0x2010, 0x2016), 0x2212)), "-")
_ALIKE = str.maketrans(_LETTERS | _DASHES | {"&": " and ", "⁄": "/"})
_MARKS = re.compile("[\u0300-\u036f]")  # of Latin, Greek and Cyrillic; other scripts spell with theirs

_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_MONTH_OF = {name[:3]: number for number, name in enumerate(_MONTHS, start=1)}
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_DAY = r"(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>[0-9]{4})"
_BEFORE, _AFTER = r"(?<![\w.,:/-])", r"(?![.,:/-]?[0-9])(?!\w)"
_DATES = [
    re.compile(_BEFORE + pattern + _AFTER)
    for pattern in (
        rf"{_YEAR}(?P<between>[-/.])(?P<month>[0-9]{{1,2}})(?P=between)(?P<day>[0-9]{{1,2}})",
        rf"(?:the )?{_DAY}(?: of)?[ -]{_MONTH}(?:(?:,? |-){_YEAR})?",
        rf"{_MONTH} (?:the )?{_DAY}(?:(?:, ?| ){_YEAR})?",
        rf"{_MONTH},? (?:of )?{_YEAR}",
    )
]

_NUMBER = re.compile(
    r"(?<![\w.,])(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]*\.[0-9]+)(?![.,]?[0-9])"  # 1,000 or 3.0 or .5
)
_POINT_OF_NO_NUMBER = re.compile(r"(?<![0-9])\.|\.(?![0-9])")
_DASH_OF_NO_NUMBER = re.compile(r"(?<=\S)-|-(?![0-9])")

_CARDINALS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
_CARDINAL_OF = {word: number for number, word in enumerate(_CARDINALS.split())}
_TENS_OF = {word: 10 * tens for tens, word in enumerate(_TENS.split(), start=2)}
_ORDINAL_OF = {
    word: f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"
    for number, word in enumerate(_ORDINALS.split(), start=1)
}


class _Punctuation(dict):
    """Table of `str.translate` that fills itself: punctuation, other signs and invisible characters go."""

    def __missing__(self, code: int) -> str | None:
        category = unicodedata.category(chr(code))
        self[code] = None if category[0] in "PS" or category == "Cf" else chr(code)
        return self[code]


# The point and the dash of numbers stay; the others go later.
_PUNCTUATION = _Punctuation({**str.maketrans(",;:/_", "     "), ord("."): ".", ord("-"): "-"})


def normalise_wide(text: str) -> str:
    """One spelling for answers that mean the same.

    - Unicode: compatibility forms, case, accents, curly quotes, long dashes, `&` as `and`; invisible characters out.
    - Punctuation and other signs are deleted, but dashes, slashes, commas and colons part words.
    - Numbers: `1,000` is `1000`, `3.0` is `3`, `.5` is `0.5`, `twenty-five` is `25`, `first` is `1st` (up to twelfth).
      A minus before a number stays. Hundred, thousand and million stay words.
    - Dates: `May 3, 1999`, `the 3rd of May 1999` and `1999-05-03` are `3 may 1999`, `Sept. 2012` is `september 2012`,
      `May 3` is `3 may`. Days that don't exist stay as they are, and so does `3/5/1999`, which means two days.
    - The articles a, an, the are dropped and white space is collapsed.
    """
    text = unicodedata.normalize("NFKC", text.translate(_APOSTROPHES)).casefold()
    text = unicodedata.normalize("NFC", _MARKS.sub("", unicodedata.normalize("NFD", text)))
    text = " ".join(text.translate(_ALIKE).split())
    for date in _DATES:
        text = date.sub(_day_month_year, text)
    text = _NUMBER.sub(_shortest, text).translate(_PUNCTUATION)
    text = _DASH_OF_NO_NUMBER.sub(" ", _POINT_OF_NO_NUMBER.sub("", text))
    return " ".join(word for word in _number_words(text.split()) if word not in _ARTICLES)


def _day_month_year(match: re.Match[str]) -> str:
    found = match.groupdict()
    month, day, year = found["month"], found.get("day"), found.get("year")
    number = _MONTH_OF.get(month[:3]) or int(month)
    try:
        datetime.date(int(year or 2000), number, int(day or 1))
    except ValueError:
        return match.group()
    return " ".join(part for part in (day and str(int(day)), _MONTHS[number - 1], year) if part)


def _shortest(match: re.Match[str]) -> str:
    whole, _, fraction = match.group().replace(",", "").partition(".")
    fraction = fraction.rstrip("0")
    return (whole or "0") + (f".{fraction}" if fraction else "")


def _number_words(words: list[str]) -> list[str]:
    """The words, with those for 0 to 99 and 1st to 12th in figures."""
    out: list[str] = []
    tens = 0  # of the word before
    for word in words:
        unit = _CARDINAL_OF.get(word)
        if tens and unit is not None and 1 <= unit <= 9:
            out[-1], tens = str(tens + unit), 0
            continue
        tens = _TENS_OF.get(word, 0)
        out.append(str(tens or unit) if tens or unit is not None else _ORDINAL_OF.get(word, word))
    return out
