// Matrix tiles of AMX: eight registers of 16 rows of 64 bytes. Included once per ISA (see
// vec.h), where `Isa::Tiles` is it, or the emulation beside it.
//
// As assembly, so that a compiler needs no flag for it. The compiler uses no tile itself, so
// there is none to declare as overwritten.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.

struct AmxTiles {
  // Before the first tile: all of them whole, 16 rows of 64 bytes.
  MHA_INLINE_MEMBER static void start() {
    struct alignas(64) Configuration {
      uint8_t palette = 1, first_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const whole;
    static_assert(sizeof(Configuration) == 64);
    __asm__ volatile("ldtilecfg %0" : : "m"(whole));
  }

  // After the last: a thread that holds tiles pays for them at every switch.
  MHA_INLINE_MEMBER static void stop() { __asm__ volatile("tilerelease"); }

  template <int T>
  MHA_INLINE_MEMBER static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  // Rows are `stride` bytes apart.
  template <int T>
  MHA_INLINE_MEMBER static void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(from), "r"(stride), "i"(T)
                     : "memory");
  }
  template <int T>
  MHA_INLINE_MEMBER static void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(to), "r"(stride), "i"(T)
                     : "memory");
  }
  // C[m][n] += A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1] over k: C holds floats, A and B
  // bfloat16.
  template <int C, int A, int B>
  MHA_INLINE_MEMBER static void multiply_add() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};
