// Functions that are also compiled for wide registers, chosen when the module is loaded.
//
// No fused operations: the same bits everywhere.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define RECOLLECT_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define RECOLLECT_WIDE
#endif
