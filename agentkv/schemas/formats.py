"""What the string formats of a JSON Schema look like, as regular expressions that only valid values match.

Each is a part of what its RFC allows: no leap seconds and no year 0 (Python's datetime has neither), days that exist,
web addresses without tricks. So whatever is written under them also parses.
"""

from __future__ import annotations

__all__ = ["ANY_TEXT", "FORMATS", "NUMERIC_FORMATS"]

_TWO = "[0-9]{2}"
_LEAP = f"(?:{_TWO}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S)"
_CALENDAR = "(?:[0-9]{1,4}Y(?:[0-9]{1,3}M(?:[0-9]{1,4}D)?)?|[0-9]{1,3}M(?:[0-9]{1,4}D)?|[0-9]{1,4}D)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9a-f]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_HEX}:){{7}}{_HEX}", f"(?:{_HEX}:){{1,7}}:", f":(?::{_HEX}){{1,7}}", "::"]
    + [f"(?:{_HEX}:){{1,{7 - n}}}(?::{_HEX}){{1,{n}}}" for n in range(1, 7)]
)
_LABEL = "[a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){0,1}"
_HOST = rf"(?:{_LABEL}\.){{1,3}}[a-z]{{2,12}}"
_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[2-7][0-9A-F])"
_NAME = "[A-Za-z0-9_+-]{1,30}"


def _uuid(version: str = "[0-9a-f]", variant: str = "[0-9a-f]") -> str:
    return f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-{variant}[0-9a-f]{{3}}-[0-9a-f]{{12}}"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_CALENDAR}(?:T{_CLOCK})?|T{_CLOCK}|[0-9]{{1,4}}W)",
    "email": rf"{_NAME}(?:\.{_NAME})?@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipvanyaddress": f"{_IPV4}|{_IPV6}",
    "uri": rf"https?://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/{_PATH}*)*(?:\?{_PATH}*)?(?:#{_PATH}*)?",
    "uuid": _uuid(),
    **{f"uuid{version}": _uuid(version, "[89ab]") for version in "1345"},
}
"""By name, unanchored."""

ANY_TEXT = frozenset({"binary", "password", "path"})
"""Formats that pydantic writes for bytes, secrets and paths: any string is one."""

NUMERIC_FORMATS = {"int32": 2**31 - 1, "int64": 2**53 - 1, "float": None, "double": None}
"""Formats of numbers, and the largest magnitude that they have where it says something."""
