/* The test kernels as PTX text. A real driver compiles this text; the software driver knows the same entries by name (kernels.c).
 *
 *   vgpu_fill(ptr, words, seed)        word[i] = mix(seed + i * 0x9E3779B97F4A7C15)
 *   vgpu_increment(ptr, words, delta)  word[i] += delta
 *   vgpu_checksum(ptr, words, out)     *out += sum of all words
 *   vgpu_spin_ms(ms)                   runs for ms milliseconds
 *   vgpu_add(ptr, words, other)        word[i] += other[i]
 *   vgpu_wait_word(flag, counter, n)   runs until *flag has reached *counter + n, whoever writes it, another process too
 *   vgpu_post_word(flag, counter, n)   *flag = *counter + n, after what was written before it
 * Words are 64 bits; every kernel covers all words with any launch shape; the last two are for one thread.
 */
#ifndef KERNELS_PTX_H
#define KERNELS_PTX_H

#define PTX_INDEX_AND_STRIDE /* %rd4 = this thread's word, %rd6 = threads in all */ \
    "  mov.u32 %r1, %ctaid.x;\n  mov.u32 %r2, %ntid.x;\n  mov.u32 %r3, %tid.x;\n  mov.u32 %r4, %nctaid.x;\n" \
    "  mul.wide.u32 %rd4, %r1, %r2;\n  cvt.u64.u32 %rd5, %r3;\n  add.u64 %rd4, %rd4, %rd5;\n  mul.wide.u32 %rd6, %r4, %r2;\n"
#define PTX_ENTRY(name) \
    ".visible .entry " name "(.param .u64 " name "_0, .param .u64 " name "_1, .param .u64 " name "_2)\n{\n" \
    "  .reg .pred %p<2>;\n  .reg .b32 %r<5>;\n  .reg .b64 %rd<12>;\n" \
    "  ld.param.u64 %rd1, [" name "_0];\n  ld.param.u64 %rd2, [" name "_1];\n  ld.param.u64 %rd3, [" name "_2];\n" \
    "  cvta.to.global.u64 %rd1, %rd1;\n" PTX_INDEX_AND_STRIDE \
    "LOOP:\n  setp.ge.u64 %p1, %rd4, %rd2;\n  @%p1 bra DONE;\n  shl.b64 %rd9, %rd4, 3;\n  add.u64 %rd9, %rd1, %rd9;\n"
#define PTX_WORD(name) /* %rd1 = the flag, %rd3 = *counter + n */ \
    ".visible .entry " name "(.param .u64 " name "_0, .param .u64 " name "_1, .param .u64 " name "_2)\n{\n" \
    "  .reg .pred %p<2>;\n  .reg .b64 %rd<5>;\n" \
    "  ld.param.u64 %rd1, [" name "_0];\n  ld.param.u64 %rd2, [" name "_1];\n  ld.param.u64 %rd3, [" name "_2];\n" \
    "  cvta.to.global.u64 %rd1, %rd1;\n  cvta.to.global.u64 %rd2, %rd2;\n" \
    "  ld.volatile.global.u64 %rd4, [%rd2];\n  add.u64 %rd3, %rd3, %rd4;\n"
#define PTX_NEXT "  add.u64 %rd4, %rd4, %rd6;\n  bra LOOP;\nDONE:\n  ret;\n}\n"

static const char kernels_ptx[] =
    ".version 5.0\n.target sm_52\n.address_size 64\n"
    PTX_ENTRY("vgpu_fill")
    "  mul.lo.u64 %rd7, %rd4, 0x9E3779B97F4A7C15U;\n  add.u64 %rd7, %rd7, %rd3;\n"
    "  shr.u64 %rd8, %rd7, 30;\n  xor.b64 %rd7, %rd7, %rd8;\n  mul.lo.u64 %rd7, %rd7, 0xBF58476D1CE4E5B9U;\n"
    "  shr.u64 %rd8, %rd7, 27;\n  xor.b64 %rd7, %rd7, %rd8;\n  st.global.u64 [%rd9], %rd7;\n"
    PTX_NEXT
    PTX_ENTRY("vgpu_increment")
    "  ld.global.u64 %rd7, [%rd9];\n  add.u64 %rd7, %rd7, %rd3;\n  st.global.u64 [%rd9], %rd7;\n"
    PTX_NEXT
    PTX_ENTRY("vgpu_checksum")
    "  cvta.to.global.u64 %rd10, %rd3;\n  ld.global.u64 %rd7, [%rd9];\n  red.global.add.u64 [%rd10], %rd7;\n"
    PTX_NEXT
    PTX_ENTRY("vgpu_add")
    "  cvta.to.global.u64 %rd10, %rd3;\n  shl.b64 %rd11, %rd4, 3;\n  add.u64 %rd11, %rd10, %rd11;\n"
    "  ld.global.u64 %rd7, [%rd9];\n  ld.global.u64 %rd8, [%rd11];\n  add.u64 %rd7, %rd7, %rd8;\n  st.global.u64 [%rd9], %rd7;\n"
    PTX_NEXT
    PTX_WORD("vgpu_wait_word")
    "AGAIN:\n  ld.volatile.global.u64 %rd4, [%rd1];\n  sub.s64 %rd4, %rd4, %rd3;\n  setp.lt.s64 %p1, %rd4, 0;\n  @%p1 bra AGAIN;\n"
    "  membar.sys;\n  ret;\n}\n"
    PTX_WORD("vgpu_post_word")
    "  membar.sys;\n  st.volatile.global.u64 [%rd1], %rd3;\n  membar.sys;\n  ret;\n}\n"
    ".visible .entry vgpu_spin_ms(.param .u32 vgpu_spin_ms_0)\n{\n"
    "  .reg .pred %p<2>;\n  .reg .b32 %r<2>;\n  .reg .b64 %rd<5>;\n"
    "  ld.param.u32 %r1, [vgpu_spin_ms_0];\n  mul.wide.u32 %rd1, %r1, 1000000;\n  mov.u64 %rd2, %globaltimer;\n"
    "AGAIN:\n  mov.u64 %rd3, %globaltimer;\n  sub.u64 %rd4, %rd3, %rd2;\n  setp.lt.u64 %p1, %rd4, %rd1;\n  @%p1 bra AGAIN;\n  ret;\n}\n";

static inline unsigned long long kernels_fill_word(unsigned long long seed, unsigned long long index)
{
    unsigned long long x = seed + index * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    return x ^ (x >> 27);
}

#endif
