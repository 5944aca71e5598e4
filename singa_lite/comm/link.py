# SPDX-License-Identifier: Apache-2.0
"""An emulated network link: its rate and latency, and the text that gives them.

What does not live here: when collectives end on it (link_communicator.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..config import env
from ..errors import OptionError

EMULATED = ("local", "shm")  # transports whose own links are memory
BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
NANOSECONDS = {"us": 10**3, "ms": 10**6, "s": 10**9}
SECOND_NS = 10**9
MAX_DIGITS = 20  # before the point, and behind it
MAX_BITS_PER_S = 10**15
MAX_LATENCY_S = 3600
NUMBER = rf"\d{{1,{MAX_DIGITS}}}(?:\.\d{{1,{MAX_DIGITS}}})?"
TEXT = re.compile(rf"(?a:({NUMBER})(kbit|mbit|gbit),({NUMBER})(us|ms|s))")


@dataclass(frozen=True)
class Link:
    """The link of each rank, the same in both directions.

    Attributes:
        bits_per_s: rate, 1 .. MAX_BITS_PER_S.
        latency_ns: nanoseconds from a rank to the next, 0 .. those of MAX_LATENCY_S.
    """

    bits_per_s: int
    latency_ns: int

    def __str__(self) -> str:
        """Return the text that ``parse_link`` reads."""
        unit = next((unit for unit in ("gbit", "mbit") if self.bits_per_s >= BITS[unit]), "kbit")
        rate, latency = _decimal(self.bits_per_s, BITS[unit]), _decimal(self.latency_ns, NANOSECONDS["ms"])
        return f"{rate}{unit},{latency}ms"

    def sending_ns(self, num_bytes: int) -> int:
        """Return the nanoseconds that the link is in use for ``num_bytes``, rounded up."""
        return -(-num_bytes * 8 * SECOND_NS // self.bits_per_s)


def parse_link(where: str, text: str) -> Link:
    """Return the Link of a text such as "100mbit,1ms".

    Args:
        where: names the option in errors.
        text: a rate in kbit, mbit or gbit (powers of ten, per second), a comma, a latency per hop in us, ms or s.

    Raises:
        OptionError: another text, a rate below 1 bit/s or above 1 Pbit/s, or a latency above an hour.
    """
    match = TEXT.fullmatch(text)
    expected = "expected RATE,LATENCY such as 100mbit,1ms: a rate in kbit, mbit or gbit, and a latency in us, ms or s"
    if match is None:
        raise OptionError(f"{where}: {expected}; got {text!r}")
    from fractions import Fraction  # Note [imports]

    rate, rate_unit, latency, latency_unit = match.groups()
    link = Link(round(Fraction(rate) * BITS[rate_unit]), round(Fraction(latency) * NANOSECONDS[latency_unit]))
    if link.bits_per_s < 1:
        raise OptionError(f"{where}: {expected}; the rate of {text!r} is less than 1 bit/s")
    if link.bits_per_s > MAX_BITS_PER_S:
        raise OptionError(f"{where}: {expected}; the rate of {text!r} is more than 1 Pbit/s (1000000gbit)")
    if link.latency_ns > MAX_LATENCY_S * SECOND_NS:
        raise OptionError(
            f"{where}: {expected}; the latency of {text!r} is more than an hour ({MAX_LATENCY_S}s)"
        )
    return link


def _decimal(value: int, unit: int) -> str:
    """Return ``value`` / ``unit``, a power of ten, in digits without an exponent, exactly."""
    whole, rest = divmod(value, unit)
    return f"{whole}.{rest:0{len(str(unit)) - 1}}".rstrip("0").rstrip(".")


def link_of_process() -> Link | None:
    """Return the link that SINGA_LITE_LINK asks for; None: the real ones. OptionError: a wrong text."""
    text = env("SINGA_LITE_LINK")
    return None if text is None else parse_link("SINGA_LITE_LINK", text)


def check_emulated(link: Link | None, transport: str) -> None:
    """Raise OptionError for a link around a transport whose links are real."""
    if link is not None and transport not in EMULATED:
        raise OptionError(
            f"connect: SINGA_LITE_LINK={link} is for ranks of one host over {' or '.join(EMULATED)}, and this world's "
            f"transport is {transport!r}, whose links are real; unset it, or start with `singa-lite run` without -H"
        )
