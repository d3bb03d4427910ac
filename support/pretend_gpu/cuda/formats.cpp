// SPDX-License-Identifier: Apache-2.0
// Numbers of 8 and 16 bits.
#include "pretend.h"

float half_to_float(uint16_t h) {
  uint32_t s = (h >> 15) << 31, e = (h >> 10) & 31, m = h & 1023;
  float f;
  uint32_t b;
  if (e == 0) {
    f = m / 16777216.0f;
    return s ? -f : f;
  }
  if (e == 31)
    b = s | 0x7f800000 | m << 13;
  else
    b = s | (e + 112) << 23 | m << 13;
  memcpy(&f, &b, 4);
  return f;
}
uint16_t float_to_half(float f) {
  uint32_t b;
  memcpy(&b, &f, 4);
  uint32_t s = b >> 16 & 0x8000;
  int e = (int)(b >> 23 & 255) - 112;
  uint32_t m = b & 0x7fffff;
  if ((b & 0x7fffffff) > 0x7f800000) return s | 0x7e00;
  if (e >= 31) return s | 0x7c00;
  if (e <= 0) {
    if (e < -10) return s;
    m |= 0x800000;
    int sh = 14 - e;
    uint32_t r = m >> sh;
    if (m >> (sh - 1) & 1) r++;
    return s | r;
  }
  uint32_t r = s | e << 10 | m >> 13;
  if (m >> 12 & 1) r++;
  return r;
}
float bfloat16_to_float(uint16_t h) {
  uint32_t b = (uint32_t)h << 16;
  float f;
  memcpy(&f, &b, 4);
  return f;
}
uint16_t float_to_bfloat16(float f) {
  uint32_t b;
  memcpy(&b, &f, 4);
  if ((b & 0x7fffffff) > 0x7f800000) return b >> 16 | 64;
  b += 0x7fff + (b >> 16 & 1);
  return b >> 16;
}
float e4m3_to_float(uint8_t v) {
  int s = v >> 7, e = v >> 3 & 15, m = v & 7;
  float f;
  if (e == 15 && m == 7)
    f = __builtin_nanf("");
  else if (!e)
    f = m / 512.0f;
  else
    f = __builtin_ldexpf(1 + m / 8.0f, e - 7);
  return s ? -f : f;
}
float e5m2_to_float(uint8_t v) { return half_to_float((uint16_t)v << 8); }
