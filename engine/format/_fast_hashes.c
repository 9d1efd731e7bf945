/* CRC-32 and BLAKE3: both libraries for Python can be called with the interpreter's lock only. */

#include "_fast.h"

/* ------------------------------------------------------------------ CRC-32 */

static uint32_t crc_table[8][256];

static void
make_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
        }
        crc_table[0][byte] = crc;
    }
    for (int step = 1; step < 8; step++) {
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = crc_table[step - 1][byte];
            crc_table[step][byte] = crc >> 8 ^ crc_table[0][crc & 255];
        }
    }
}

static uint32_t
crc_by_table(uint32_t crc, const uint8_t *data, size_t size)
{
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = crc_table[7][word & 255] ^ crc_table[6][word >> 8 & 255] ^ crc_table[5][word >> 16 & 255] ^
              crc_table[4][word >> 24 & 255] ^ crc_table[3][word >> 32 & 255] ^
              crc_table[2][word >> 40 & 255] ^ crc_table[1][word >> 48 & 255] ^ crc_table[0][word >> 56];
    }
    for (; size; data++, size--) {
        crc = crc >> 8 ^ crc_table[0][(crc ^ *data) & 255];
    }
    return crc;
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_FOLDING 1
#include <immintrin.h>

/* "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009), with the constants
   of its section on the bit-reflected polynomial. `size` is at least 64, and a multiple of 16. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t
crc_by_folding(uint32_t crc, const uint8_t *data, size_t size)
{
    const __m128i by_64_bytes = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_16_bytes = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i to_64_bits = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i lane[4];
    for (int i = 0; i < 4; i++) {
        lane[i] = _mm_loadu_si128((const __m128i *)data + i);
    }
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)crc));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        for (int i = 0; i < 4; i++) {
            __m128i low = _mm_clmulepi64_si128(lane[i], by_64_bytes, 0x00);
            __m128i high = _mm_clmulepi64_si128(lane[i], by_64_bytes, 0x11);
            lane[i] = _mm_xor_si128(_mm_xor_si128(low, high), _mm_loadu_si128((const __m128i *)data + i));
        }
    }
    __m128i sum = lane[0];
    for (int i = 1; i < 4; i++) {
        __m128i low = _mm_clmulepi64_si128(sum, by_16_bytes, 0x00);
        __m128i high = _mm_clmulepi64_si128(sum, by_16_bytes, 0x11);
        sum = _mm_xor_si128(_mm_xor_si128(low, high), lane[i]);
    }
    for (; size; data += 16, size -= 16) {
        __m128i low = _mm_clmulepi64_si128(sum, by_16_bytes, 0x00);
        __m128i high = _mm_clmulepi64_si128(sum, by_16_bytes, 0x11);
        sum = _mm_xor_si128(_mm_xor_si128(low, high), _mm_loadu_si128((const __m128i *)data));
    }
    sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_16_bytes, 0x10));
    __m128i high = _mm_srli_si128(sum, 4);
    sum = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(sum, low_words), to_64_bits, 0x00), high);
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(sum, low_words), barrett, 0x10);
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(sum, quotient), 1);
}
#endif

static int can_fold;

void
prepare_crc(void)
{
    make_table();
#ifdef HAS_FOLDING
    can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
}

uint32_t
crc_of(uint32_t crc, const uint8_t *data, size_t size)
{
#ifdef HAS_FOLDING
    if (size >= 64 && can_fold) {
        size_t folded = size & ~(size_t)15;
        crc = crc_by_folding(crc, data, folded);
        data += folded;
        size -= folded;
    }
#endif
    return crc_by_table(crc, data, size);
}

/* ------------------------------------------------------------------ BLAKE3 */

enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8, KEYED_HASH = 16 };
#define BLOCK_BYTES 64
#define CHUNK_BYTES 1024

static const uint32_t blake3_start[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static inline uint32_t
rotated(uint32_t word, int bits)
{
    return word >> bits | word << (32 - bits);
}

#define MIX(a, b, c, d, x, y)                \
    a += b + (x), d = rotated(d ^ a, 16);    \
    c += d, b = rotated(b ^ c, 12);          \
    a += b + (y), d = rotated(d ^ a, 8);     \
    c += d, b = rotated(b ^ c, 7)

static void
blake3_block(uint32_t chain[8], const uint8_t block[BLOCK_BYTES], uint64_t number, uint32_t size, uint32_t flags)
{
    static const uint8_t order[7][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
        {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
        {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
        {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
        {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
        {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
        {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
    };
    uint32_t m[16];
    uint32_t v[16] = {
        chain[0], chain[1], chain[2], chain[3], chain[4], chain[5], chain[6], chain[7],
        blake3_start[0], blake3_start[1], blake3_start[2], blake3_start[3],
        (uint32_t)number, (uint32_t)(number >> 32), size, flags,
    };
    memcpy(m, block, BLOCK_BYTES);
    for (int round = 0; round < 7; round++) {
        const uint8_t *at = order[round];
        MIX(v[0], v[4], v[8], v[12], m[at[0]], m[at[1]]);
        MIX(v[1], v[5], v[9], v[13], m[at[2]], m[at[3]]);
        MIX(v[2], v[6], v[10], v[14], m[at[4]], m[at[5]]);
        MIX(v[3], v[7], v[11], v[15], m[at[6]], m[at[7]]);
        MIX(v[0], v[5], v[10], v[15], m[at[8]], m[at[9]]);
        MIX(v[1], v[6], v[11], v[12], m[at[10]], m[at[11]]);
        MIX(v[2], v[7], v[8], v[13], m[at[12]], m[at[13]]);
        MIX(v[3], v[4], v[9], v[14], m[at[14]], m[at[15]]);
    }
    for (int i = 0; i < 8; i++) {
        chain[i] = v[i] ^ v[i + 8];
    }
}

/* The chaining value of a subtree that begins with the chunk of this number, or of the whole (`ROOT`). */
static void
blake3_tree(const uint32_t start[8], const uint8_t *data, size_t size, uint64_t number, uint32_t flags,
            uint32_t chain[8])
{
    if (size <= CHUNK_BYTES) {
        uint32_t first = CHUNK_START;
        memcpy(chain, start, HASH_BYTES);
        for (; size > BLOCK_BYTES; data += BLOCK_BYTES, size -= BLOCK_BYTES) {
            blake3_block(chain, data, number, BLOCK_BYTES, (flags & KEYED_HASH) | first);
            first = 0;
        }
        uint8_t last[BLOCK_BYTES] = {0};
        memcpy(last, data, size);
        blake3_block(chain, last, number, (uint32_t)size, flags | first | CHUNK_END);
        return;
    }
    size_t left = CHUNK_BYTES; /* as many chunks as there can be, a power of two, and one byte less at most */
    while (2 * left < size) {
        left *= 2;
    }
    uint32_t both[16];
    blake3_tree(start, data, left, number, flags & KEYED_HASH, both);
    blake3_tree(start, data + left, size - left, number + left / CHUNK_BYTES, flags & KEYED_HASH, both + 8);
    memcpy(chain, start, HASH_BYTES);
    blake3_block(chain, (const uint8_t *)both, 0, BLOCK_BYTES, flags | PARENT);
}

void
blake3(const uint8_t *data, size_t size, uint8_t hash[HASH_BYTES])
{
    uint32_t chain[8];
    blake3_tree(blake3_start, data, size, 0, ROOT, chain);
    memcpy(hash, chain, HASH_BYTES);
}

uint64_t
blake3_short(const uint8_t hash_key[HASH_BYTES], const uint8_t *data, size_t size)
{
    uint32_t start[8], chain[8];
    memcpy(start, hash_key, HASH_BYTES);
    blake3_tree(start, data, size, 0, KEYED_HASH | ROOT, chain);
    return chain[0] | (uint64_t)chain[1] << 32;
}
