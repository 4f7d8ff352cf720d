// Runs of the byte of ones, shortened: [Note: trits] in trits.py. The code of a byte depends on the start
// of its run, which is known from the last other byte before it.
// Blocks have 256 threads, a thread eight bytes.

// the largest value of the threads before; at least `least`; the largest of all in *top
D i64 block_max_before(i64 value, i64 least, i64* top) { return block_before<256>(value, least, top, Most()); }
// values become the largest of those before them, -1 for the first
D void max_before_array(i64* values, i64 length) { scan_array(values, length, -1, Most()); }
// the last of a thread's bytes from `i` on that is not of ones, else -1
D i64 last_break(const u8* trits, i64 length, i64 i) {
  i64 last = -1;
  for (int k = 0; k < 8; ++k, ++i)
    if (i < length && trits[i] != 121) last = i;
  return last;
}
// Bytes that a thread's bytes from `i` on become, where `last` is the last break before them; stored
// where `out` is not null. A run of ones gives a byte at every fourteenth and at its end.
D int shorten(const u8* trits, i64 length, i64 i, i64 last, u8* out) {
  int made = 0;
  for (int k = 0; k < 8 && i < length; ++k, ++i) {
    u32 byte = trits[i];
    if (byte != 121) {
      last = i;
    } else {
      const u32 place = (u32)((i - last - 1) % 14);
      if (place < 13 && i + 1 < length && trits[i + 1] == 121) continue;
      byte = place ? 242 + place : 121;
    }
    if (out) out[made] = (u8)byte;
    ++made;
  }
  return made;
}
// The same of a block, whose last break before it is known: bytes of all its threads, stored from `out`
// on where that is not null.
D void shortened(const u8* trits, i64 length, i64 i, i64 least, u8* out, i64* all) {
  i64 top;
  const i64 last = block_max_before(last_break(trits, length, i), least, &top);
  const i64 to = block_scan<256>(shorten(trits, length, i, last, (u8*)0), all);
  if (out) shorten(trits, length, i, last, out + to);
}
// number of bytes of trits that a thread's bytes from `i` on stand for
D int lengthened(const u8* data, i64 length, i64 i) {
  int total = 0;
  for (int k = 0; k < 8; ++k, ++i)
    if (i < length) total += data[i] < 243 ? 1 : data[i] - 241;
  return total;
}
D void lengthen(const u8* data, i64 length, i64 i, u8* trits) {
  for (int k = 0; k < 8 && i < length; ++k, ++i) {
    if (data[i] < 243) { *trits++ = data[i]; continue; }
    for (int j = data[i] - 241; j > 0; --j) *trits++ = 121;
  }
}
