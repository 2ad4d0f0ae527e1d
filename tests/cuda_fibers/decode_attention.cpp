// Runs `decode_attention.cu` behind a kernel that writes its product.
#include "decode_attention.cu"

// stands for what comes before attention: reads its earlier output, and writes the product, which `from` has
KERNEL(32, 1) write_product(u32 *to, const u32 *from, u32 words, const u16 *out, u32 values, bool waits_first) {
  if (waits_first) wait_for_previous_kernel();
  allow_next_kernel();
  wait_for_previous_kernel();
  for (u32 i = thread_index(); i < values; i += 32) load(out + i);
  for (u32 i = thread_index(); i < words; i += 32) store(to + i, load_constant(from + i));
}

// Tensors and floats: the kernel's, then the product, and lengths of a second step. Numbers: blocks, rows, threads,
// blocks of a cluster, shared memory, words of the product, steps, whether the second step's product waits first, and
// the kernel's.
extern "C" void run_attention(const char *, void **t, const int64_t *n, const float *f) {
  u32 blocks = n[0], rows = n[1], words = n[5], values = rows * KV_HEADS * GROUP * HEAD_DIM;
  if (n[2] != THREADS || n[4] != SHARED_BYTES) fibers::machine.shadow.fault("launch: other sizes than the source has");
  for (u32 step = 0; step < n[6]; step++) {
    bool waits_first = step && n[7];
    launch({1}, 32, 1, 0, true,
           [=] { write_product((u32 *)t[3], (u32 *)t[10], words, (u16 *)t[0], values, waits_first); });
    auto attention = [=] {
      decode_attention((u16 *)t[0], (u8 *)t[1], (u8 *)t[2], t[3], (int *)t[4], (int *)t[step ? 11 : 5], (float *)t[6],
                       (float *)t[7], (float *)t[8], (float *)t[9], n[8], n[9], n[10], f[0], f[1], f[2], f[3], f[4]);
    };
    launch({blocks, rows}, THREADS, n[3], n[4], true, attention, IS_E4M3 ? 1 : 2);
  }
}
