"""Runs a static Linux program for 64-bit Arm on any processor, with the emulator unicorn."""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from pathlib import Path

import unicorn
from unicorn import arm64_const as arm64

PAGE = 4096
STACK, STACK_BYTES = 0x7F00_0000_0000, 1 << 20
HEAP, HEAP_BYTES = 0x10_0000_0000, 1 << 30
SUPERVISOR_CALL = 2  # what unicorn calls the exception

# numbers of the C library's calls
READ, WRITE, WRITEV, EXIT, EXIT_GROUP, MUNMAP, MMAP, MPROTECT = 63, 64, 66, 93, 94, 215, 222, 226
HARMLESS = {MUNMAP, MPROTECT, 96, 98, 135, 178}  # thread ids, futexes and signal masks, too

# names of the auxiliary vector
PROGRAM_HEADERS, HEADER_SIZE, HEADERS, PAGE_SIZE, CAPABILITIES, RANDOM = 3, 4, 5, 6, 16, 25
FLOAT, SIMD, DOT_PRODUCT = 1 << 0, 1 << 1, 1 << 20


class Machine:
    """One program with its memory.

    Args:
        program: A static ELF file that is loaded where it says.
        arguments: What the program sees behind its name.
        given: What it reads from its standard input.
        dot_product: Whether it is told that the processor has the dot product extension.
    """

    def __init__(
        self, program: Path, arguments: Sequence[str], given: bytes = b"", dot_product: bool = True
    ) -> None:
        self.given = memoryview(given)
        self.written = {1: bytearray(), 2: bytearray()}
        self.status: int | None = None
        self.free = HEAP
        self.cpu = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.cpu.ctl_set_cpu_model(arm64.UC_CPU_ARM64_MAX)
        self.cpu.reg_write(arm64.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # float registers may be used
        self.cpu.mem_map(STACK, STACK_BYTES)
        self.cpu.mem_map(HEAP, HEAP_BYTES)
        self.cpu.hook_add(unicorn.UC_HOOK_INTR, self._call)
        self._load(program, [program.name, *arguments], dot_product)

    def run(self) -> bytes:
        """Run to the end; what the program wrote to its standard output.

        Raises:
            RuntimeError: The program failed; with what it wrote to its standard error.
        """
        self.cpu.emu_start(self.entry, 0)
        if self.status != 0:
            raise RuntimeError(f"status {self.status}: {self.written[2].decode()}")
        return bytes(self.written[1])

    def _load(self, program: Path, arguments: Sequence[str], dot_product: bool) -> None:
        image = program.read_bytes()
        self.entry, table = struct.unpack_from("<QQ", image, 24)
        size, count = struct.unpack_from("<HH", image, 54)
        segments = [struct.unpack_from("<IIQQQQQQ", image, table + size * i) for i in range(count)]
        loaded = [segment for segment in segments if segment[0] == 1]
        lowest = min(segment[3] for segment in loaded) // PAGE * PAGE
        end = max(segment[3] + segment[6] for segment in loaded)
        self.cpu.mem_map(lowest, (end - lowest + PAGE - 1) // PAGE * PAGE)
        headers = 0
        for _, _, offset, address, _, in_file, _, _ in loaded:
            self.cpu.mem_write(address, image[offset : offset + in_file])
            if offset <= table < offset + in_file:
                headers = address + table - offset
        # texts at the top of the stack, below them what the program starts with
        top = STACK + STACK_BYTES - PAGE
        places = []
        for text in (*arguments, "0123456789abcdef"):
            content = text.encode() + b"\0"
            self.cpu.mem_write(top, content)
            places.append(top)
            top += len(content)
        capabilities = FLOAT | SIMD | (DOT_PRODUCT if dot_product else 0)
        auxiliary = {
            PROGRAM_HEADERS: headers,
            HEADER_SIZE: size,
            HEADERS: count,
            PAGE_SIZE: PAGE,
            CAPABILITIES: capabilities,
            RANDOM: places[-1],
        }
        words = [len(arguments), *places[:-1], 0, 0]
        words += [word for pair in auxiliary.items() for word in pair] + [0, 0]
        start = STACK + STACK_BYTES - 2 * PAGE
        self.cpu.mem_write(start, struct.pack(f"<{len(words)}Q", *words))
        self.cpu.reg_write(arm64.UC_ARM64_REG_SP, start)

    def _call(self, cpu: unicorn.Uc, number: int, _: object) -> None:
        if number != SUPERVISOR_CALL:
            where = cpu.reg_read(arm64.UC_ARM64_REG_PC)
            self.written[2] += f"exception {number} at {where:#x}".encode()
            self.status = -1
            cpu.emu_stop()
            return
        x0, x1, x2, x8 = (
            cpu.reg_read(register)
            for register in (
                arm64.UC_ARM64_REG_X0,
                arm64.UC_ARM64_REG_X1,
                arm64.UC_ARM64_REG_X2,
                arm64.UC_ARM64_REG_X8,
            )
        )
        answer = 0
        if x8 == READ:
            part = self.given[:x2]
            self.given = self.given[x2:]
            cpu.mem_write(x1, bytes(part))
            answer = len(part)
        elif x8 == WRITE:
            self.written[x0] += cpu.mem_read(x1, x2)
            answer = x2
        elif x8 == WRITEV:
            for i in range(x2):
                start, size = struct.unpack("<QQ", cpu.mem_read(x1 + 16 * i, 16))
                self.written[x0] += cpu.mem_read(start, size)
                answer += size
        elif x8 == MMAP:
            answer = self.free
            self.free += (x1 + PAGE - 1) // PAGE * PAGE
            if self.free > HEAP + HEAP_BYTES:
                answer = -errno.ENOMEM
        elif x8 in (EXIT, EXIT_GROUP):
            self.status = x0
            cpu.emu_stop()
        elif x8 not in HARMLESS:
            answer = -errno.ENOSYS
        cpu.reg_write(arm64.UC_ARM64_REG_X0, answer % (1 << 64))


__all__ = ["Machine"]
