"""Decoding of a few frames of a video stream from the keyframes before them.

All packets are read, which is fast, and few are decoded. Frame i is the one with the i-th smallest
presentation time. Decoding starts at the last keyframe that is shown at or before it: what follows a keyframe
and is shown after it needs no earlier packet, also in open groups of pictures. The times are those of the
file and may be negative or unevenly spaced. FFmpeg's function for seeking is not used, because it misses
keyframes or changes times in several containers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

MAX_REORDER = 16
"""Largest difference between the positions of a frame in decoding and presentation, as in H.264 and HEVC."""

_STATEFUL_SIDE_DATA = ("palette", "new_extradata")
"""Data beside a packet that later packets need, too."""


@dataclass(frozen=True, kw_only=True)
class PacketIndex:
    """Packets of a stream.

    Attributes:
        pts: Presentation times of the shown frames, ascending.
        keyframes: Presentation time and position of the packet of each keyframe, ascending. An edit list may
            hide keyframes.
        packets: Position -> PyAV packet, around the needed frames.
    """

    pts: list[int]
    keyframes: list[tuple[int, int]]
    packets: dict[int, Any]

    def decode(self, stream: Any, frames: Sequence[int]) -> Iterator[Any]:
        """Yield the PyAV frames with ascending numbers; end early where the decoder contradicts the index."""
        for keyframe, group in groupby(frames, self._find_keyframe):
            if keyframe is None:
                return
            needed = list(group)
            for number, frame in self._decode_from(stream, *keyframe):
                if number == needed[0]:
                    yield frame
                    del needed[0]
                    if not needed:
                        break
            if needed:
                return

    def _find_keyframe(self, frame: int) -> tuple[int, int] | None:
        index = bisect_right(self.keyframes, (self.pts[frame], len(self.pts) + MAX_REORDER))
        return self.keyframes[index - 1] if index else None

    def _decode_from(self, stream: Any, pts: int, position: int) -> Iterator[tuple[int, Any]]:
        """Yield the numbers and frames from a keyframe on."""
        stream.codec_context.flush_buffers()
        number = bisect_left(self.pts, pts)
        is_keyframe = not self.packets[position].is_discard
        while number < len(self.pts):
            packet = self.packets.get(position)  # None at the end makes the decoder return its last frames.
            for frame in stream.decode(packet):
                if frame.pts is not None and frame.pts < pts:
                    continue
                # Containers also mark frames with which decoding cannot start.
                if [frame.pts] != self.pts[number : number + 1] or is_keyframe > frame.key_frame:
                    return
                if frame.is_corrupt:
                    return
                yield number, frame
                is_keyframe = False
                number += 1
            if packet is None:
                return
            position += 1


def read_packets(container: Any, stream: Any, first: int, last: int) -> PacketIndex | None:
    """Read the packets of a stream and keep those around a range of frames.

    Args:
        container: PyAV container.
        stream: Its video stream.
        first: First needed frame.
        last: Last needed frame.

    Returns:
        The index, or None if the times of the packets do not order the frames.
    """
    times: list[int] = []
    hidden: set[int] = set()
    keyframes: list[tuple[int, int]] = []
    retained: dict[int, Any] = {}
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if packet.pts is None or packet.is_corrupt or any(map(packet.has_sidedata, _STATEFUL_SIDE_DATA)):
            return None
        position = len(times)
        num_shown = position - len(hidden)
        if packet.is_keyframe:
            keyframes.append((packet.pts, position))
            if num_shown + MAX_REORDER <= first:
                retained.clear()
        if num_shown <= last + 2 * MAX_REORDER:
            retained[position] = packet
        if packet.is_discard:
            hidden.add(position)
        times.append(packet.pts)
    order = sorted(range(len(times)), key=times.__getitem__)
    visible = [times[position] for position in order if position not in hidden]
    is_ordered = all(abs(position - rank) <= MAX_REORDER for rank, position in enumerate(order))
    if not is_ordered or len(set(visible)) < len(visible):
        return None
    return PacketIndex(pts=visible, keyframes=sorted(keyframes), packets=retained)
