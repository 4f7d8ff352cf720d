"""A module's kernels compiled with numba, as one object file that needs nothing of it afterwards.

Numba types and lowers each kernel; all go into one LLVM module, which is optimized and emitted
once. Left to itself, numba would add two wrappers a kernel, optimize each apart, emit it for its
own linker and store it in its own cache. To the kernels come an entry for each, which reads the
arrays it is given (see cpu/native.py), and the two functions with which kernels get and free
memory. All else is dropped, so that only the C library's symbols are left open.

This reaches into numba below its documented interface. So what it finds is compared with what it
expects, and whatever is not as expected means that no object file is made.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import types
from numba.core import compiler, config, sigutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import nrtdynmod

from compll.backends.cpu.declare import OPTIONS, Declared
from compll.backends.cpu.native import (
    DATA,
    DESCR,
    FAILED,
    FLAGS,
    LETTERS,
    NDIM,
    NEEDED,
    REFUSED,
    SHAPE,
    TYPE,
    Stored,
    letters,
    symbol,
)

#: LLVM's types of scalars, as arguments
LLVM = {
    "float32": "float",
    "float64": "double",
    "int32": "i32",
    "int64": "i64",
    "uint32": "i32",
    "uint64": "i64",
    "bool": "i8",
}
#: what kernels return
RESULTS = (types.void, types.int64)
#: numba's MemInfo up to its allocator: references, destructor, its argument, data, size
MEMINFO = "{i64, i8*, i8*, i8*, i64}"
#: what is provided of numba's runtime
RUNTIME = {"NRT_MemInfo_alloc_aligned": "ptr (i64, i32)", "NRT_MemInfo_call_dtor": "void (ptr)"}
SUPPORT = f"""
declare ptr @malloc(i64)
declare void @free(ptr)
@compll_ndarray = external global i8

define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {{
  %wide = zext i32 %align to i64
  %room = add i64 %wide, 48
  %total = add i64 %size, %room
  %base = call ptr @malloc(i64 %total)
  %none = icmp eq ptr %base, null
  br i1 %none, label %failed, label %done
failed:
  ret ptr null
done:
  %number = ptrtoint ptr %base to i64
  %end = add i64 %number, %room
  %over = urem i64 %end, %wide
  %start = sub i64 %end, %over
  %data = inttoptr i64 %start to ptr
  call void @llvm.memset.p0.i64(ptr %base, i8 0, i64 48, i1 false)
  store i64 1, ptr %base
  %slot = getelementptr i8, ptr %base, i64 24
  store ptr %data, ptr %slot
  %length = getelementptr i8, ptr %base, i64 32
  store i64 %size, ptr %length
  ret ptr %base
}}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define void @NRT_MemInfo_call_dtor(ptr %info) {{
  call void @free(ptr %info)
  ret void
}}

define i1 @compll_fits(ptr %array, i32 %letters, i32 %dims) {{
  %a = getelementptr i8, ptr %array, i64 {TYPE}
  %type = load ptr, ptr %a
  %plain = icmp eq ptr %type, @compll_ndarray
  br i1 %plain, label %look, label %no
look:
  %b = getelementptr i8, ptr %array, i64 {NDIM}
  %nd = load i32, ptr %b
  %same = icmp eq i32 %nd, %dims
  %c = getelementptr i8, ptr %array, i64 {FLAGS}
  %flags = load i32, ptr %c
  %set = and i32 %flags, {NEEDED}
  %usable = icmp eq i32 %set, {NEEDED}
  %d = getelementptr i8, ptr %array, i64 {DESCR}
  %descr = load ptr, ptr %d
  %e = getelementptr i8, ptr %descr, i64 {LETTERS}
  %four = load i32, ptr %e
  %three = and i32 %four, 16777215
  %typed = icmp eq i32 %three, %letters
  %both = and i1 %same, %usable
  %all = and i1 %both, %typed
  ret i1 %all
no:
  ret i1 false
}}
"""
NEXT = "\n  "


class Unfit(Exception):
    """Numba's code is not as this module knows it."""


def kind(type_: Any) -> str:
    """An argument's kind, as cpu/native.py reads it."""
    if isinstance(type_, types.Array):
        if type_.layout != "C" or not type_.mutable or type_.ndim not in (1, 2):
            raise Unfit(f"argument {type_}")
        return f"{type_.dtype.name}[{type_.ndim}]"
    if type_.name not in LLVM:
        raise Unfit(f"argument {type_}")
    return str(type_.name)


def arguments(signature: Any) -> list[str]:
    """The kinds of a compiled function's arguments."""
    if signature.return_type not in RESULTS:
        raise Unfit(f"result {signature.return_type}")
    return [kind(one) for one in signature.args]


def entry(name: str, target: str, kinds: list[str]) -> str:
    """The entry NAME: it checks the arrays, calls the kernel and tells its result."""
    checks, loads, passed = [], [], ["ptr %result", "ptr %error"]
    for number, one in enumerate(kinds):
        if "[" in one:
            checks.append(check(f"%a{number}", one))
            loads += load(f"%a{number}", one)
            passed += flattened(f"%a{number}", one)
        else:
            passed.append(f"{LLVM[one]} %a{number}")
    given = [f"{LLVM.get(one, 'ptr')} %a{number}" for number, one in enumerate(kinds)]
    fits = [
        line
        for number, test in enumerate(checks)
        for line in (f"%t{number} = {test}", f"%f{number + 1} = and i1 %f{number}, %t{number}")
    ]
    return f"""
define i64 @{name}({", ".join(given)}) {{
  %result = alloca i64
  %error = alloca ptr
  store i64 0, ptr %result
  %f0 = icmp eq i1 true, true
  {NEXT.join(fits)}
  br i1 %f{len(checks)}, label %run, label %refuse
run:
  {NEXT.join(loads)}
  %status = call i32 @"{target}"({", ".join(passed)})
  %well = icmp eq i32 %status, 0
  br i1 %well, label %done, label %fail
done:
  %value = load i64, ptr %result
  ret i64 %value
refuse:
  ret i64 {REFUSED}
fail:
  ret i64 {FAILED}
}}
"""


def check(array: str, one: str) -> str:
    """The test that an argument is such an array."""
    name, dims = one[:-1].split("[")
    return f"call i1 @compll_fits(ptr {array}, i32 {letters(np.dtype(name))}, i32 {dims})"


def load(array: str, one: str) -> list[str]:
    """What reads an array's address and shape, and computes its count and strides."""
    name, dims = one[:-1].split("[")
    size = np.dtype(name).itemsize
    lines = [
        f"{array}.at = getelementptr i8, ptr {array}, i64 {DATA}",
        f"{array}.data = load ptr, ptr {array}.at",
        f"{array}.to = getelementptr i8, ptr {array}, i64 {SHAPE}",
        f"{array}.shape = load ptr, ptr {array}.to",
        f"{array}.n0 = load i64, ptr {array}.shape",
    ]
    if dims == "1":
        return [*lines, f"{array}.n = add i64 {array}.n0, 0"]
    return [
        *lines,
        f"{array}.next = getelementptr i64, ptr {array}.shape, i64 1",
        f"{array}.n1 = load i64, ptr {array}.next",
        f"{array}.n = mul i64 {array}.n0, {array}.n1",
        f"{array}.row = mul i64 {array}.n1, {size}",
    ]


def flattened(array: str, one: str) -> list[str]:
    """An array as numba passes it: owner, object, count, item size, data, shape, strides."""
    name, dims = one[:-1].split("[")
    size = np.dtype(name).itemsize
    shape = [f"i64 {array}.n0", f"i64 {array}.n1"][: int(dims)]
    strides = [f"i64 {array}.row", f"i64 {size}"][-int(dims) :]
    head = ["ptr null", "ptr null", f"i64 {array}.n", f"i64 {size}", f"ptr {array}.data"]
    return [*head, *shape, *strides]


def expected(kinds: list[str]) -> str:
    """The type of a compiled kernel, as LLVM prints it."""
    passed = ["ptr", "ptr"]
    for one in kinds:
        passed += [p.split()[0] for p in flattened("", one)] if "[" in one else [LLVM[one]]
    return f"i32 ({', '.join(passed)})"


def compare(part: Any, known: dict[str, str]) -> None:
    """Compare the types of the kernel and of the runtime's functions with what is known."""
    for one in part.functions:
        if str(one.global_value_type) != known.get(one.name, str(one.global_value_type)):
            raise Unfit(f"{one.name} is of type {one.global_value_type}")


def flags() -> Any:
    """What numba is to make of a kernel: its code alone, which is not loaded."""
    found: Any = compiler.Flags()
    options = {"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True} | OPTIONS
    cpu_target.options.parse_as_flags(found, options)
    found.no_compile = True
    found.no_rewrites = True  # of constants, branches and array expressions: kernels have none
    return found


def laid_out(part: Any) -> None:
    """What numba does to a module before it links it, but for the optimizing."""
    part.data_layout = cpu_target.target_context.codegen()._data_layout


def lowered(one: Declared, signature: str, library: Any) -> Any:
    """What numba tells of a kernel with this signature, whose code it added to a library."""
    target = cpu_target
    args, result = sigutils.normalize_signature(signature)
    contexts = (target.typing_context, target.target_context)
    given: Any = (*contexts, one.function, args, result, flags(), {}, library)
    return compiler.compile_extra(*given)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector: it takes a tenth of a compilation, for 30 MB."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@global_compiler_lock
@uncollected()
def stored(kernels: dict[str, Declared]) -> Stored:
    """One object of these kernels. Raises Unfit, or whatever comes of a surprise."""
    if str(nrtdynmod._meminfo_struct_type) != MEMINFO:
        raise Unfit(f"memory is described by {nrtdynmod._meminfo_struct_type}")
    for context in (cpu_target.typing_context, cpu_target.target_context):
        context.refresh()  # what numba knows of NumPy, as its own compiler does first
    library = cpu_target.target_context.codegen().create_library("compll")
    library._optimize_functions = laid_out  # all of it is optimized once, at the end
    found: dict[str, list[list[str]]] = {}
    texts, known = [SUPPORT], dict(RUNTIME)
    for name, one in kernels.items():
        found[name] = []
        for signature in one.signatures:
            made = lowered(one, signature, library)
            kinds, target = arguments(made.signature), made.fndesc.llvm_func_name
            known[target] = expected(kinds)
            texts.append(f'declare i32 @"{target}"{known[target][3:]}\n')
            texts.append(entry(symbol(name, len(found[name])), target, kinds))
            found[name].append(kinds)
    entries = {symbol(name, number) for name in found for number in range(len(found[name]))}
    return Stored(found, (emitted(library, "".join(texts), known, entries),))


def emitted(library: Any, text: str, known: dict[str, str], entries: set[str]) -> bytes:
    """The object file of a library and a text, of which the entries alone are seen from outside."""
    whole = library._final_module
    parts = dict.fromkeys(library._linking_libraries)
    # Of functions that a module merely shares, only those are linked in that are called.
    for part in parts:
        whole.link_in(part._get_module_for_linking(), preserve=True)
    compare(whole, known)
    support = llvm.parse_assembly(text)
    support.triple, support.data_layout = whole.triple, whole.data_layout
    whole.link_in(support)
    for one in whole.functions:
        if not one.is_declaration and one.name not in entries:
            one.linkage = "internal"
    whole.verify()
    with wide(library._codegen) as machine:
        library._optimize_final_module()
        image: bytes = machine.emit_object(whole)
    for one in whole.functions:
        if one.is_declaration and one.name.startswith("NRT_"):
            raise Unfit(f"{one.name} is not provided")
    return image


@contextmanager
def wide(codegen: Any) -> Iterator[Any]:
    """A target machine that uses vectors of 512 bits where they are no burden.

    LLVM avoids them on all of Intel's, since the first with AVX-512 lowered their clock for them.
    Those after, which have VBMI2, hardly do (Skylake-X and Cascade Lake have not): int4_group
    encodes a quarter faster, terngrad a seventh.
    """
    before = codegen._tm
    if "+avx512vbmi2" in codegen._tm_features.split(","):
        codegen._tm = wider(codegen)
    try:
        yield codegen._tm
    finally:
        codegen._tm = before


@cache
def wider(codegen: Any) -> Any:
    """Numba's target machine, but for the width of vectors that LLVM prefers."""
    settings: Any = config
    options = {"opt": settings.OPT}
    codegen._customize_tm_options(options)
    options["features"] += ",-prefer-256-bit"
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(**options)
