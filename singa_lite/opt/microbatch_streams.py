# SPDX-License-Identifier: Apache-2.0
"""Random streams by the number of the microbatch, so that training with order="fixed" draws alike on any ranks.

Note [streams of microbatches]: random numbers of a microbatch begin where its number says: counter
``(update * microbatches + number) << 20`` of the seed that all ranks share. So dropout drops the same elements of a
sample, whichever rank has it. A microbatch that draws 2**20 times or more runs into the next one's numbers. A stream is
placed when a step of a Model begins, as something else may have drawn before, and without a Model when the call before
ends. Behind the backward pass of a call numbers come from a part that all ranks share, COMMON later: so an update that
draws, and noise that a step adds to parameters behind it, are equal on all ranks, and on any number of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..device import Device
from ..errors import OptionError
from ..graph.recorder import unrecorded
from .accumulate import GradientSums
from .base import Optimizer
from .consistency import Consistency

DRAWS = 20  # bits of the counter for draws within a microbatch
COMMON = 1 << 42  # number of the first part that all ranks share


class MicrobatchStreams:
    """The random streams of the devices that have parameters, and their seeds. Note [streams of microbatches].

    Args:
        rank: number of this one.
        num_ranks: how many there are.
        sums: those of this rank's microbatches.
        ranks: what knows the parameters.
    """

    def __init__(self, rank: int, num_ranks: int, sums: GradientSums, ranks: Consistency) -> None:
        self._rank, self._num_ranks, self._sums, self._ranks = rank, num_ranks, sums, ranks
        self._seeds: dict[Device, int] = {}

    def place(self, opt: Optimizer) -> None:
        """Go on where this rank's next microbatch begins; ``opt`` counts the updates."""
        self._place(opt, self._rank * self._sums.num_batches + self._sums.num_calls)

    def share(self, opt: Optimizer, is_update: bool) -> None:
        """Go on in a part that all ranks share, behind the backward pass of a call that ``is_update`` or is not."""
        # an update has the same number on all ranks, whatever that of their last calls is
        self._place(opt, COMMON + (0 if is_update else self._sums.num_calls))

    def check_draws(self) -> None:
        """Raise OptionError if the microbatch of a call has drawn from numbers that all ranks share."""
        with unrecorded():
            for device in self._devices():
                _, counter = device.get_random_state()
                if counter >> DRAWS >= COMMON and counter % (1 << DRAWS):
                    raise OptionError(
                        f"DistOpt: order='fixed': since the last call {device} drew from numbers that all ranks share; "
                        "call place_streams() of the optimizer where a microbatch begins that is not the first of a "
                        "step"
                    )

    def states_loaded(self) -> None:
        """Go on with the seeds that the devices have now, those of a checkpoint."""
        self._seeds.clear()

    def seeds_by_name(self) -> dict[str, int]:
        """Return the seed of each device; ranks have GPUs of other numbers, so these have names by their order."""
        seeds = enumerate(self._seeds.items())
        return {f"the seed of device {number}, {device.kind}": seed for number, (device, seed) in seeds}

    def _place(self, opt: Optimizer, number: int) -> None:
        """Go on where microbatch ``number`` of the update begins. OptionError: a device has got another seed since."""
        number += opt._step_counter * self._num_ranks * self._sums.num_batches
        for device in self._devices():
            seed, _ = device.get_random_state()
            if self._seeds.setdefault(device, seed) != seed:
                raise OptionError(
                    f"DistOpt: order='fixed': the seed of {device} was {self._seeds[device]} at first and is {seed} "
                    "now; set it before compile, the same on all ranks"
                )
            device.set_random_state((seed, number << DRAWS))

    def _devices(self) -> Iterable[Device]:
        return dict.fromkeys(param.device for param in self._ranks.names)
