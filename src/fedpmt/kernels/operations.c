/* Single operations of a transformer, forward and backward, each on one core: GELU, dropout and attention over short
 * sequences. In PyTorch they take much of a small transformer's step, and matrix products the rest.
 *
 * Compiled on first use with native.c (see library.py); operations.py calls them, and its structures follow these.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
/* As in native.c. */
#define VERSION 6
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vector load(const float *from) { return *(const vector *)from; }
INLINE void store(float *to, vector value) { *(vector *)to = value; }
INLINE vector same(float value) { return (vector){0} + value; }
INLINE vector choose(whole which, vector yes, vector no) {
    return (vector)(((whole)yes & which) | ((whole)no & ~which));
}
INLINE int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* e^x for x <= 0, to two units in the last place; 0 below -87. e^x = 2^n e^r with |r| <= ln(2) / 2. */
INLINE vector exponential(vector x) {
    const whole tiny = x < -87.0f;
    const vector shifted = x * 1.44269504f + 12582912.0f; /* n stands in the last bits */
    const vector n = shifted - 12582912.0f;
    const vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vector sum = same(1.0f / 5040);
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const vector power = (vector)((whole)sum + ((whole)shifted << 23));
    return choose(tiny, (vector){0}, power);
}

/* ---- GELU ---- */

/* x Φ(x) and its derivative Φ(x) + x φ(x), where φ and Φ are the density and the distribution of a normal variable.
 * Φ(-t) = φ(t) M(t) for t >= 0, and Mills' ratio M is a polynomial in 1 / (1 + 0.21 t), fitted to 2e-8. */
INLINE void gelu(vector x, vector *value, vector *slope) {
    const vector t = (vector)((whole)x & 0x7fffffff);
    const vector u = 1.0f / (1.0f + 0.21f * t);
    vector mills = same(-0.17961578f);
    mills = mills * u + 0.71085134f;
    mills = mills * u - 0.82782288f;
    mills = mills * u + 0.87581888f;
    mills = mills * u - 0.23543587f;
    mills = mills * u + 0.31300963f;
    mills = mills * u + 0.17343902f;
    mills = mills * u + 0.21323601f;
    mills = mills * u + 0.20983380f;
    const vector density = 0.39894228f * exponential(-0.5f * x * x);
    const vector tail = density * mills * u;
    const vector share = choose(x < 0.0f, tail, 1.0f - tail);
    *value = x * share;
    *slope = share + x * density;
}

/* Slopes may be NULL: where nothing goes backward. */
void fedpmt_gelu(const float *inputs, float *values, float *slopes, int64_t count) {
    vector value, slope;
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        gelu(load(inputs + at), &value, &slope);
        store(values + at, value);
        if (slopes) store(slopes + at, slope);
    }
    if (at < count) {
        float rest[LANES] = {0};
        memcpy(rest, inputs + at, (count - at) * sizeof(float));
        gelu(load(rest), &value, &slope);
        memcpy(values + at, &value, (count - at) * sizeof(float));
        if (slopes) memcpy(slopes + at, &slope, (count - at) * sizeof(float));
    }
}

/* ---- random bits ---- */

/* xoshiro128++ by Blackman and Vigna, a generator in each lane. */
typedef struct {
    bits a, b, c, d;
} Generators;

INLINE bits turned(bits value, int by) { return (value << by) | (value >> (32 - by)); }

INLINE bits draw(Generators *from) {
    const bits drawn = turned(from->a + from->d, 7) + from->a;
    const bits shifted = from->b << 9;
    from->c ^= from->a;
    from->d ^= from->b;
    from->b ^= from->c;
    from->a ^= from->d;
    from->c ^= shifted;
    from->d = turned(from->d, 11);
    return drawn;
}

static Generators seeded(uint64_t seed) {
    Generators made;
    bits *parts[4] = {&made.a, &made.b, &made.c, &made.d};
    for (int part = 0; part < 4; part++)
        for (int lane = 0; lane < LANES; lane++) {
            /* splitmix64 */
            uint64_t mixed = (seed += 0x9e3779b97f4a7c15u);
            mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
            mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
            (*parts[part])[lane] = (uint32_t)((mixed ^ (mixed >> 31)) >> 32);
        }
    return made;
}

/* Which of the next numbers are kept: a number is dropped where the 31 bits drawn for it are below `dropped`. */
INLINE whole kept(Generators *from, int32_t dropped) { return (whole)(draw(from) >> 1) >= dropped; }

/* Multiplies what is kept by `scale`; the same seed keeps the same entries, so it is its own backward pass. */
void fedpmt_dropout(const float *inputs, float *outputs, int64_t count, uint64_t seed, int32_t dropped, float scale) {
    Generators from = seeded(seed);
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        store(outputs + at, choose(kept(&from, dropped), scale * load(inputs + at), (vector){0}));
    if (at < count) {
        float rest[LANES] = {0};
        memcpy(rest, inputs + at, (count - at) * sizeof(float));
        const vector last = choose(kept(&from, dropped), scale * load(rest), (vector){0});
        memcpy(outputs + at, &last, (count - at) * sizeof(float));
    }
}

/* ---- attention ---- */

/* [sample, head, token, feature] by strides; features are next to each other. */
typedef struct {
    float *data;
    int64_t sample, head, token;
} Heads;

/* What is added to scores, by strides of zero where it is the same for all; no mask: data is NULL. */
typedef struct {
    const float *data;
    int64_t sample, head, query, key;
} Bias;

typedef struct {
    int64_t samples, heads, queries, keys, features, values; /* features of queries and keys, and of values */
    float scale, kept; /* kept: what probabilities that are not dropped are multiplied by */
    int64_t dropped;
    uint64_t seed;
} Attention;

/* A block of `rows` x `vectors` of sums = left right; left by strides, right and sums with rows of `width`. */
INLINE void block(const float *left, int64_t row, int64_t column, const float *right, int64_t width, int64_t inner,
                  float *sums, int64_t out, const int rows, const int vectors, float scale) {
    vector sum[4][3];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) sum[i][j] = (vector){0};
    for (int64_t k = 0; k < inner; k++) {
        vector from[3];
        for (int j = 0; j < vectors; j++) from[j] = load(right + k * width + j * LANES);
        for (int i = 0; i < rows; i++) {
            const float by = left[i * row + k * column];
            for (int j = 0; j < vectors; j++) sum[i][j] += by * from[j];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) store(sums + i * out + j * LANES, scale * sum[i][j]);
}

#define COLUMNS(rows)                                                                                                  \
    for (; at + 3 * LANES <= width; at += 3 * LANES)                                                                   \
        block(left, row, column, right + at, width, inner, sums + at, width, rows, 3, scale);                          \
    for (; at + 2 * LANES <= width; at += 2 * LANES)                                                                   \
        block(left, row, column, right + at, width, inner, sums + at, width, rows, 2, scale);                          \
    for (; at < width; at += LANES)                                                                                    \
        block(left, row, column, right + at, width, inner, sums + at, width, rows, 1, scale)

/* sums = scale left right, where left is [count, inner] by strides and the others have rows of `width`, padded. */
static void product(const float *left, int64_t row, int64_t column, const float *right, float *sums, int64_t count,
                    int64_t inner, int64_t width, float scale) {
    for (; count >= 4; count -= 4, left += 4 * row, sums += 4 * width) {
        int64_t at = 0;
        COLUMNS(4);
    }
    for (; count >= 1; count--, left += row, sums += width) {
        int64_t at = 0;
        COLUMNS(1);
    }
}

/* Rows of `from`, padded with zeros. */
static void pack(const float *from, int64_t stride, int64_t rows, int64_t columns, float *to) {
    const int64_t width = padded(columns);
    for (int64_t i = 0; i < rows; i++, from += stride, to += width) {
        memcpy(to, from, columns * sizeof(float));
        memset(to + columns, 0, (width - columns) * sizeof(float));
    }
}

/* Columns of `from` as rows, padded with zeros. */
static void turn(const float *from, int64_t stride, int64_t rows, int64_t columns, float *to) {
    const int64_t width = padded(rows);
    for (int64_t j = 0; j < columns; j++) memset(to + j * width + rows, 0, (width - rows) * sizeof(float));
    for (int64_t i = 0; i < rows; i++, from += stride)
        for (int64_t j = 0; j < columns; j++) to[j * width + i] = from[j];
}

static void unpack(const float *from, int64_t width, int64_t rows, int64_t columns, float *to, int64_t stride) {
    for (int64_t i = 0; i < rows; i++, from += width, to += stride) memcpy(to, from, columns * sizeof(float));
}

INLINE float total(vector of) { return ((of[0] + of[4]) + (of[1] + of[5])) + ((of[2] + of[6]) + (of[3] + of[7])); }

/* Scores to probabilities, row by row; what pads a row becomes zero. */
static void softmax(float *scores, int64_t rows, int64_t columns) {
    const int64_t width = padded(columns);
    for (int64_t i = 0; i < rows; i++, scores += width) {
        for (int64_t j = columns; j < width; j++) scores[j] = -INFINITY;
        vector most = load(scores);
        for (int64_t j = LANES; j < width; j += LANES) {
            const vector next = load(scores + j);
            most = choose(next > most, next, most);
        }
        float top = most[0];
        for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
        if (top == -INFINITY) {
            /* A query that may attend to nothing has no outputs, as in PyTorch. */
            memset(scores, 0, width * sizeof(float));
            continue;
        }
        vector sum = {0};
        for (int64_t j = 0; j < width; j += LANES) {
            const vector one = exponential(load(scores + j) - top);
            store(scores + j, one);
            sum += one;
        }
        const vector by = same(1.0f / total(sum));
        for (int64_t j = 0; j < width; j += LANES) store(scores + j, by * load(scores + j));
    }
}

static void drop(float *values, int64_t count, Generators *from, const Attention *plan) {
    for (int64_t at = 0; at < count; at += LANES)
        store(values + at, choose(kept(from, (int32_t)plan->dropped), plan->kept * load(values + at), (vector){0}));
}

INLINE float *place(Heads heads, int64_t sample, int64_t head) {
    return heads.data + sample * heads.sample + head * heads.head;
}

/* Numbers of working memory that both passes need at most. */
int64_t fedpmt_attention_room(const Attention *plan) {
    const int64_t wide = padded(plan->keys), broad = padded(plan->features) + padded(plan->values);
    return 2 * plan->queries * wide + broad * wide + 2 * (plan->queries + plan->keys) * broad;
}

/* Outputs, and the probabilities before dropout: [sample, head, query, keys padded]. */
void fedpmt_attention(const Attention *plan, const Heads *given, const Bias *bias, float *probabilities, float *room) {
    const Heads query = given[0], key = given[1], value = given[2], out = given[3];
    const int64_t n = plan->queries, m = plan->keys, wide = padded(m), values = padded(plan->values);
    float *turned_keys = room, *packed = turned_keys + plan->features * wide, *dropped = packed + m * values;
    float *sums = dropped + n * wide;
    Generators from = seeded(plan->seed);
    for (int64_t b = 0; b < plan->samples; b++)
        for (int64_t h = 0; h < plan->heads; h++) {
            float *mine = probabilities + (b * plan->heads + h) * n * wide;
            turn(place(key, b, h), key.token, m, plan->features, turned_keys);
            product(place(query, b, h), query.token, 1, turned_keys, mine, n, plan->features, wide, plan->scale);
            if (bias->data) {
                const float *added = bias->data + b * bias->sample + h * bias->head;
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = 0; j < m; j++) mine[i * wide + j] += added[i * bias->query + j * bias->key];
            }
            softmax(mine, n, m);
            const float *used = mine;
            if (plan->dropped) {
                memcpy(dropped, mine, n * wide * sizeof(float));
                drop(dropped, n * wide, &from, plan);
                used = dropped;
            }
            pack(place(value, b, h), value.token, m, plan->values, packed);
            product(used, wide, 1, packed, sums, n, m, values, 1.0f);
            unpack(sums, values, n, plan->values, place(out, b, h), out.token);
        }
}

/* Gradients of queries, keys and values. With P the probabilities, D what dropout multiplies them by and G the gradient of
 * the outputs: dV = (P D)^T G, dP = (G V^T) D, dS = P (dP - sum_j P dP), dQ = scale dS K, dK = scale dS^T Q. */
void fedpmt_attention_backward(const Attention *plan, const Heads *given, const float *probabilities, float *room) {
    const Heads query = given[0], key = given[1], value = given[2], gradient = given[3];
    const Heads to_query = given[4], to_key = given[5], to_value = given[6];
    const int64_t n = plan->queries, m = plan->keys, wide = padded(m);
    const int64_t features = padded(plan->features), values = padded(plan->values);
    float *turned_values = room, *errors = turned_values + plan->values * wide, *used = errors + n * wide;
    float *packed = used + n * wide, *sums = packed + (n + m) * (features + values);
    Generators from = seeded(plan->seed);
    for (int64_t b = 0; b < plan->samples; b++)
        for (int64_t h = 0; h < plan->heads; h++) {
            const float *mine = probabilities + (b * plan->heads + h) * n * wide;
            const Generators before = from;
            memcpy(used, mine, n * wide * sizeof(float));
            if (plan->dropped) drop(used, n * wide, &from, plan);
            pack(place(gradient, b, h), gradient.token, n, plan->values, packed);
            product(used, 1, wide, packed, sums, m, n, values, 1.0f);
            unpack(sums, values, m, plan->values, place(to_value, b, h), to_value.token);

            turn(place(value, b, h), value.token, m, plan->values, turned_values);
            product(place(gradient, b, h), gradient.token, 1, turned_values, errors, n, plan->values, wide, 1.0f);
            if (plan->dropped) {
                from = before;
                drop(errors, n * wide, &from, plan);
            }
            for (int64_t i = 0; i < n; i++) {
                vector sum = {0};
                for (int64_t j = 0; j < wide; j += LANES) sum += load(mine + i * wide + j) * load(errors + i * wide + j);
                const float mean = total(sum);
                for (int64_t j = 0; j < wide; j += LANES)
                    store(errors + i * wide + j,
                          load(mine + i * wide + j) * (load(errors + i * wide + j) - mean));
            }
            pack(place(key, b, h), key.token, m, plan->features, packed);
            product(errors, wide, 1, packed, sums, n, m, features, plan->scale);
            unpack(sums, features, n, plan->features, place(to_query, b, h), to_query.token);
            pack(place(query, b, h), query.token, n, plan->features, packed);
            product(errors, 1, wide, packed, sums, m, n, features, plan->scale);
            unpack(sums, features, m, plan->features, place(to_key, b, h), to_key.token);
        }
}

/* ---- the interface ---- */

#define AT(type, field) offsetof(type, field)

/* As `fedpmt_interface` in native.c. */
int32_t fedpmt_operations_interface(int64_t *numbers, int32_t room) {
    static const int64_t known[] = {
        VERSION, LANES,
        sizeof(Heads), AT(Heads, data), AT(Heads, sample), AT(Heads, head), AT(Heads, token),
        sizeof(Bias), AT(Bias, data), AT(Bias, sample), AT(Bias, head), AT(Bias, query), AT(Bias, key),
        sizeof(Attention), AT(Attention, samples), AT(Attention, heads), AT(Attention, queries), AT(Attention, keys),
        AT(Attention, features), AT(Attention, values), AT(Attention, scale), AT(Attention, kept), AT(Attention, dropped),
        AT(Attention, seed),
    };
    const int32_t count = (int32_t)(sizeof known / sizeof *known);
    for (int32_t n = 0; n < count && n < room; n++) numbers[n] = known[n];
    return count;
}
