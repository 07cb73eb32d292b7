"""A public function's way from its arguments to its launches, the same for all of them.

What depends only on the kind of arguments (types, shapes, strides, alignment) is worked out once and kept; a call with
arguments of a known kind looks its launches up, checks for overlap, and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from burt_numba.host import errors as reports
from burt_numba.host.arrays import Description, Family, family_of, known_families, stream_handle
from burt_numba.host.checks import describe, one_device, require_flag
from burt_numba.host.errors import BurtDimensionError, ErrorBuffer, EventCells, FunctionErrors
from burt_numba.host.launching import Launch, prepare
from burt_numba.host.memory import (
    current_device,
    device_context,
    device_count,
    is_capturing,
    is_current,
    synchronize,
    workspace,
)
from burt_numba.target import SIMULATED

VECTOR_BYTES = 16
_MOST_KINDS = 4096


@dataclass(frozen=True)
class Request:
    """A kind of call: all that the choice of launches may depend on."""

    operands: tuple[Description | None, ...]
    options: tuple[Any, ...]
    device: int
    aligned: bool
    """The operands that are read and written in vectors lie at multiples of 16 bytes."""
    validate: bool


class Result(NamedTuple):
    """What an output is, allocated where it was not given."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Answer:
    """What an operation makes of a request."""

    launches: Sequence[Launch]
    results: Sequence[Result]
    workspace: tuple[int, ...] = ()
    """Bytes of each kind of a ``host.memory.Workspace``, whose parts are operands after those of the function."""


@dataclass
class _Call:
    """A request's answer, ready to run."""

    family: Family
    device: int
    on_host: bool
    launches: list[Any]
    results: Sequence[Result]
    overlaps: list[tuple[int, int, int, int, int, int, bool]] = field(default_factory=list)
    """(writer, its first and last byte, other, its first and last byte, the same memory is allowed)."""
    workspace: tuple[int, ...] = ()
    is_empty: bool = False
    """There is nothing to launch: what was given to be written stays as it is."""
    cells: EventCells | None = None
    """The function's own error buffer on the device."""
    apart: list[int] | None = None
    """Pointers of the operands of an earlier call, which do not overlap."""


class Operation:
    """One public function.

    ``names`` are the operands in order; the last ``results`` of them are what a call returns, one as it is and more as
    a tuple. ``written`` are those the kernels write to, ``updated`` those of them whose contents before the call
    matter, ``vectors`` those whose alignment matters. ``answer(request)`` checks shapes and types and chooses the
    launches; ``request.operands`` holds None for what was not given.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        written: Sequence[str],
        vectors: Sequence[str],
        answer: Callable[[Request], Answer],
        updated: Sequence[str] = (),
        results: int = 1,
    ) -> None:
        self.name = name
        self.names = tuple(names)
        self._first_result = len(self.names) - results
        self.errors = FunctionErrors(name)
        self._written = tuple(self.names.index(n) for n in written)
        self._updated = tuple(self.names.index(n) for n in updated)
        self._vectors = tuple(self.names.index(n) for n in vectors)
        self._answer = answer
        self._calls: dict[Any, _Call] = {}

    def __call__(
        self,
        operands: tuple[Any, ...],
        numbers: tuple[float, ...],
        options: tuple[Any, ...],
        stream: Any,
        errors: ErrorBuffer | None,
        validate: bool,
        stacklevel: int = 3,
    ) -> Any:
        if errors is not None and not isinstance(errors, ErrorBuffer):
            raise TypeError(f"{self.name}: errors: expected an ErrorBuffer, got {type(errors).__name__}")
        if validate is not False and validate is not True:
            validate = require_flag(self.name, "validate_output", validate)
        keys: list[Any] = []
        pointers: list[int] = []
        for operand in operands:
            if operand is None and keys:
                keys.append(None)
                pointers.append(0)
                continue
            try:
                key, pointer = (known_families.get(type(operand)) or family_of(operand)).inspect(operand)  # type: ignore[union-attr]
            except Exception:
                self._refuse(operands)
                raise
            keys.append(key)
            pointers.append(pointer)
        aligned = self._is_aligned(pointers)
        kind = (aligned, validate, options, *keys)
        call = self._calls.get(kind) or self._prepare(kind, operands, options, aligned, validate)
        if call.on_host and not SIMULATED:
            return self._run_on_copies(operands, call, numbers, options, stream, errors, validate, stacklevel + 2)
        if None in keys[self._first_result :]:
            given, operands = operands, self._with_results(call, operands)
            for place in range(self._first_result, len(operands)):
                if given[place] is None:
                    pointers[place] = call.family.pointer(operands[place])
            if aligned and not self._is_aligned(pointers):
                kind = (False, *kind[1:])
                call = self._calls.get(kind) or self._prepare(kind, given, options, False, validate)
        if pointers != call.apart:
            self._require_apart(call, operands, pointers)
            call.apart = pointers
        if errors is not None:
            cells = errors.cells(call.device)
        else:
            cells = call.cells or self._default_cells(call)
            if cells.changed():
                self.errors.report(cells, stacklevel)
        if call.launches:
            self._launch(call, operands, pointers, numbers, cells, stream)
            if errors is None and (SIMULATED or reports.is_synchronous()):
                synchronize(call.device)
                self.errors.report(cells, stacklevel)
        return self._returned(operands)

    def _is_aligned(self, pointers: Sequence[int]) -> bool:
        alignment = 0
        for place in self._vectors:
            alignment |= pointers[place]
        return alignment % VECTOR_BYTES == 0

    def _with_results(self, call: _Call, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands, with new arrays for the results that were not given."""
        every = list(operands)
        for place, result in enumerate(call.results, self._first_result):
            if every[place] is None:
                every[place] = call.family.empty(result.shape, result.dtype, call.device)
        return tuple(every)

    def _returned(self, operands: tuple[Any, ...]) -> Any:
        results = operands[self._first_result :]
        return results if len(results) > 1 else results[0]

    def _require_apart(self, call: _Call, operands: Sequence[Any], pointers: Sequence[int]) -> None:
        """Refuse operands that are written and overlap others."""
        for writer, start, end, other, other_start, other_end, same_allowed in call.overlaps:
            a, b = pointers[writer], pointers[other]
            if a + start < b + other_end and b + other_start < a + end and not (a == b and same_allowed):
                # In place, the first operand is what is written.
                written = 0 if writer == self._first_result and operands[writer] is operands[0] else writer
                raise BurtDimensionError(
                    f"{self.name}: {self.names[written]}: expected memory apart from {self.names[other]}, "
                    f"but the two overlap"
                )

    def _default_cells(self, call: _Call) -> EventCells:
        call.cells = self.errors.cells(call.device)
        return call.cells

    def _refuse(self, operands: Sequence[Any]) -> None:
        """Raise the TypeError of the first operand that is no array."""
        for place, (name, operand) in enumerate(zip(self.names, operands, strict=True)):
            if operand is not None or place == 0:
                describe(self.name, name, operand)

    def _launch(
        self,
        call: _Call,
        operands: Sequence[Any],
        pointers: Sequence[int],
        numbers: Sequence[float],
        cells: Any,
        stream: Any,
    ) -> None:
        if SIMULATED:
            arrays = [None if o is None else family_of(o).as_numpy(o) for o in operands]  # type: ignore[union-attr]
            if stream is not None:
                stream_handle(stream)
            self._launch_on(call, arrays, numbers, cells, 0)
            return
        handle = call.family.stream(operands[0], call.device) if stream is None else stream_handle(stream)
        if is_current(call.device):
            if len(call.launches) == 1 and not cells.place_is_old and not call.workspace:
                call.launches[0](pointers, numbers, cells, handle)
            else:
                self._launch_on(call, pointers, numbers, cells, handle)
        else:
            with device_context(call.device):
                self._launch_on(call, pointers, numbers, cells, handle)

    @staticmethod
    def _launch_on(call: _Call, operands: Sequence[Any], numbers: Sequence[float], cells: Any, stream: int) -> None:
        if not call.workspace:
            _launch_all(call.launches, operands, numbers, cells, stream)
            return
        space = workspace(call.device, stream)
        with space.lock:
            space.fit(call.workspace)
            try:
                _launch_all(call.launches, [*operands, *space.operands], numbers, cells, stream)
            except BaseException:
                space.renew()
                raise

    def _prepare(
        self, kind: Any, operands: Sequence[Any], options: tuple[Any, ...], aligned: bool, validate: bool
    ) -> _Call:
        """Work out the call of a kind, and keep it."""
        descriptions = [
            None if operand is None else describe(self.name, name, operand)
            for name, operand in zip(self.names, operands, strict=True)
        ]
        given = [(n, d) for n, d in zip(self.names, descriptions, strict=True) if d is not None]
        device = one_device(self.name, given)
        family = given[0][1].family
        device_count()  # says so, where there is none
        place = device if device is not None else 0 if SIMULATED else current_device() or 0
        answer = self._answer(Request(tuple(descriptions), options, place, aligned, validate))
        on_host = device is None
        launches = [] if on_host and not SIMULATED else [prepare(x, place) for x in answer.launches]
        is_empty = not answer.launches
        call = _Call(family, place, on_host, launches, answer.results, [], answer.workspace, is_empty)
        for writer in self._written:
            written = descriptions[writer]
            # What was not given overlaps nothing: it is absent, or memory that is still to be allocated.
            if written is None:
                continue
            for other, description in enumerate(descriptions):
                if other == writer or description is None or (other in self._written and other < writer):
                    continue
                if 0 in description.shape:
                    continue
                # One result may take the place of the first operand.
                same = (
                    [(description.shape, description.dtype)] == answer.results
                    and writer == self._first_result
                    and other == 0
                    and description.is_contiguous
                )
                call.overlaps.append((writer, *written.extent, other, *description.extent, same))
        if len(self._calls) >= _MOST_KINDS:
            self._calls.clear()
        self._calls[kind] = call
        return call

    def _run_on_copies(
        self,
        operands: tuple[Any, ...],
        call: _Call,
        numbers: tuple[float, ...],
        options: tuple[Any, ...],
        stream: Any,
        errors: ErrorBuffer | None,
        validate: bool,
        stacklevel: int,
    ) -> Any:
        """Host arrays on a real device: copy over, run, copy back, and wait."""
        from burt_numba.backend import cuda

        every = self._with_results(call, operands)
        if call.is_empty:
            return self._returned(every)
        hosts = [None if operand is None else _host_view(operand) for operand in every]
        with cuda.gpus[call.device]:
            copies = [
                None
                if given is None or host is None
                else cuda.device_array(host.shape, host.dtype)
                if place in self._written and place not in self._updated
                else _on_device(host)
                for place, (given, host) in enumerate(zip(operands, hosts, strict=True))
            ]
            returned = self(tuple(copies), numbers, options, stream, errors, validate, stacklevel)
            if stream is not None:
                synchronize(call.device)
            copies[self._first_result :] = returned if isinstance(returned, tuple) else [returned]
            for place in self._written:
                host, copy = hosts[place], copies[place]
                if host is not None and copy is not None:
                    copy.copy_to_host(host)
        return self._returned(every)


def _on_device(host: Any) -> Any:
    """A copy of a NumPy array. One made by Numba has its strides, which for an axis of size 1 may be anything."""
    import numpy as np

    from burt_numba.backend import cuda

    copy = cuda.device_array(host.shape, host.dtype)
    copy.copy_to_device(np.asarray(host, order="C"))
    return copy


def _host_view(array: Any) -> Any:
    family = family_of(array)
    assert family is not None
    return family.describe(array).family.as_numpy(array)


def _launch_all(
    launches: Sequence[Any], operands: Any, numbers: Sequence[float], cells: EventCells, stream: int
) -> None:
    # In a graph the reset would be repeated by every replay, and forget places that nobody has seen.
    if cells.place_is_old and (SIMULATED or not is_capturing(stream)):
        cells.renew(stream)
    for launch in launches:
        launch(operands, numbers, cells, stream)
