/* Local SGD on a chain of common layers, one device on one core, without an interpreter between its steps; and the
 * server's sum of replies. Compiled on first use (see library.py); nothing but the C library is needed.
 *
 * Layout. Images are channels-last; channels and features are padded with zeros to a multiple of LANES, and padded
 * weights are zero and stay so. A convolution's filters are [row, column x channel, filter], a linear layer's weights
 * [input, output].
 *
 * Where the time goes. Products keep a block of sums or of weights in registers. A linear layer's weights are larger
 * than the near caches: they are gone through in chunks, and by the lowest one once a step. Behind a max-pool and a ReLU
 * most of the error signal is zero (three quarters and about half of the rest), so convolutions go backward one nonzero
 * entry at a time.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
#define SLACK LANES
/* Changes with the meaning of an argument or a field, which sizes and offsets alone don't show. */
#define VERSION 6
#define INLINE static inline __attribute__((always_inline))

typedef float half __attribute__((vector_size(2 * LANES), aligned(4), may_alias));
typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    int32_t convolution, inputs, outputs;          /* channels or features, padded but for the data's own */
    int32_t height, width, kernel_height, kernel_width; /* of a convolution's input, and its window */
    int32_t pooled, rectified, biased;
    int32_t blocks, own_inputs, own_outputs;        /* its weights are [block, input, output]; own: without padding */
    float gain, bias_gain;                          /* of its gradients, over those of other layers; 0: they stay */
} Layer;

/* A layer's tensors. Velocities are NULL without momentum, shifts where nothing is added to the gradient. What is given
 * and what is handed back is in the caller's layout: NULL where weights lie ready, and where nothing is asked for. */
typedef struct {
    float *weights, *biases;
    float *velocity, *bias_velocity;
    const float *shift, *bias_shift;
    const float *given, *given_bias;
    float *wanted, *wanted_bias;
} Values;

/* The model at one width. */
typedef struct {
    const Layer *layers;
    const Values *values;
} Net;

/* What a step does with a gradient g:
 *
 *     without momentum    w <- kept w - rate gain g - shift
 *     with momentum       d = g + (decay w + shift) / gain;  v <- momentum v + d;  w <- w - rate gain v
 *     Nesterov            the same, but w <- w - rate gain (d + momentum v)
 *
 * In the first line decay and spring are part of `kept`, and the rate part of `shift`. */
typedef struct {
    int32_t layers, frozen, cached, classes;
    int32_t nets, moving, nesterov;        /* moving: with momentum */
    int32_t changes;                       /* whether what was given is taken off what is handed back */
    int64_t samples, epochs, batch, limit; /* limit: steps, negative for none */
    float rate, kept, momentum, decay;
    const uint8_t *absent;                 /* classes whose logits are zero and stay so; NULL for none */
} Plan;

/* The same for weights or biases of one layer: their gain is in the rate, and with momentum in the other two. */
typedef struct {
    int moving, nesterov, fresh; /* fresh: velocities are zero, whatever stands in their place */
    float rate, kept, momentum, decay, shifted;
} Step;

typedef struct {
    int64_t at; /* where its window begins */
    float error;
} Entry;

typedef struct {
    int high, broad;          /* of a convolution's output, before pooling */
    int64_t size, pooled;     /* numbers per sample, before and after pooling */
    float *outputs;           /* of a batch, after pooling and ReLU */
    float *unpooled, *errors; /* of one sample, before pooling */
    int32_t *places;          /* which of four was the largest */
    float *gradient;          /* of a convolution: [filter, row, column x channel], rows padded to LANES */
    float *turned;            /* filters as [filter, row, column x channel] */
    Entry *entries;           /* nonzero errors of one sample, by filter */
    int64_t *counts;          /* how many each filter has */
} Work;

/* Stays in its register: left alone, compilers read it from memory again at each use, and loads become the limit. */
#if defined(__AVX512F__)
#define HOLD(value) __asm__("" : "+v"(value))
#elif defined(__AVX__)
#define HOLD(value) __asm__("" : "+x"(value))
#else
#define HOLD(value)
#endif
INLINE int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

static Step step_of(const Plan *plan, float gain, int fresh) {
    if (gain == 0) return (Step){.kept = 1};
    return (Step){
        .moving = plan->moving,
        .nesterov = plan->nesterov,
        .fresh = fresh,
        .rate = plan->rate * gain,
        .kept = plan->kept,
        .momentum = plan->momentum,
        .decay = plan->decay / gain,
        .shifted = 1 / gain,
    };
}

/* ---- linear layers ---- */

/* How many inputs, and vectors of outputs, of the weights a block in registers holds. */
#define ROWS 4
#define VECTORS 3
/* Inputs at a time, so that their weights stay in the second cache, and outputs at a time, so that a batch of them and
 * of their errors stays in the first. */
#define CHUNK 64
#define PANEL 192
/* Samples that go through frozen layers at a time, at least: as many as a panel of outputs has room for in the first
 * cache. */
#define KEPT 48

/* A batch and what its products with the weights are added to. */
typedef struct {
    const float *x;
    float *y;
    int64_t count;
} Batch;

/* The most neighbours in a row of an image, and rows and columns of vectors of a filter's gradient, in registers. */
#define PIXELS 14
#define MOST_COLUMNS 5
#define GRADIENT_ROWS 5
#define GRADIENT_VECTORS 10

#define WIDTH LANES
#include "products.h"
#ifdef __AVX512F__
#define WIDE 16
#define WIDTH WIDE
#include "products.h"
#endif

typedef vector_8 vector;
#define load load_8
#define store store_8
#define begin begin_8
#define moved moved_8

/* The sums of four vectors. */
INLINE half totals(vector a, vector b, vector c, vector d) {
    const vector ab = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
                      __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    const vector cd = __builtin_shufflevector(c, d, 0, 8, 2, 10, 4, 12, 6, 14) +
                      __builtin_shufflevector(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    const vector sums = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                        __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
}

/* below[m][r] = error[m] . w[r] for four rows of the weights. */
INLINE void rows_down(const int samples, const float *w, const float *error, float *below, int64_t inputs,
                      int64_t outputs) {
    vector sums[3][ROWS];
    for (int m = 0; m < samples; m++)
        for (int r = 0; r < ROWS; r++) sums[m][r] = (vector){0};
    for (int64_t n = 0; n < outputs; n += LANES) {
        vector errors[3];
        for (int m = 0; m < samples; m++) {
            errors[m] = load(error + m * outputs + n);
            HOLD(errors[m]);
        }
        for (int r = 0; r < ROWS; r++) {
            vector row = load(w + r * outputs + n);
            HOLD(row);
            for (int m = 0; m < samples; m++) sums[m][r] += errors[m] * row;
        }
    }
    for (int m = 0; m < samples; m++)
        *(half *)(below + m * inputs) = totals(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
}

#ifdef WIDE
/* The same for pairs of samples, one in each half of a vector, so that every sum keeps its order. */
INLINE void rows_down_wide(const int pairs, const float *w, const float *error, float *below, int64_t inputs,
                           int64_t outputs) {
    vector_16 sums[3][ROWS];
    for (int p = 0; p < pairs; p++)
        for (int r = 0; r < ROWS; r++) sums[p][r] = (vector_16){0};
    for (int64_t n = 0; n < outputs; n += LANES) {
        vector_16 errors[3];
        for (int p = 0; p < pairs; p++) {
            const vector first = load(error + 2 * p * outputs + n), second = load(error + (2 * p + 1) * outputs + n);
            errors[p] = __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            HOLD(errors[p]);
        }
        for (int r = 0; r < ROWS; r++) {
            const vector one = load(w + r * outputs + n);
            vector_16 row = __builtin_shufflevector(one, one, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
            HOLD(row);
            for (int p = 0; p < pairs; p++) sums[p][r] += errors[p] * row;
        }
    }
#define LOW(sum) __builtin_shufflevector(sum, sum, 0, 1, 2, 3, 4, 5, 6, 7)
#define HIGH(sum) __builtin_shufflevector(sum, sum, 8, 9, 10, 11, 12, 13, 14, 15)
    for (int p = 0; p < pairs; p++) {
        const vector_16 *own = sums[p];
        *(half *)(below + 2 * p * inputs) = totals(LOW(own[0]), LOW(own[1]), LOW(own[2]), LOW(own[3]));
        *(half *)(below + (2 * p + 1) * inputs) = totals(HIGH(own[0]), HIGH(own[1]), HIGH(own[2]), HIGH(own[3]));
    }
}
#endif

/* Goes over the blocks of a chunk of the weights, panel by panel, and calls for those of the next rows meanwhile. */
#ifdef WIDE
#define WIDE_BLOCKS(WORK, end)                                                                                   \
    for (; n + VECTORS * WIDE <= end; n += VECTORS * WIDE) {                                                     \
        for (int r = 0; r < ROWS; r++)                                                                           \
            for (int v = 0; v < VECTORS; v++) __builtin_prefetch(w + (k + ROWS + r) * outputs + n + v * WIDE);   \
        WORK(16, VECTORS);                                                                                       \
    }                                                                                                            \
    for (; n + 2 * WIDE <= end; n += 2 * WIDE) { WORK(16, 2); }                                                  \
    for (; n + WIDE <= end; n += WIDE) { WORK(16, 1); }
#else
#define WIDE_BLOCKS(WORK, end)
#endif
#define BLOCKS(WORK, first, last)                                                                                \
    for (int64_t panel = 0; panel < outputs; panel += PANEL) {                                                   \
        const int64_t end = panel + PANEL < outputs ? panel + PANEL : outputs;                                   \
        for (int64_t k = first; k < last; k += ROWS) {                                                           \
            int64_t n = panel;                                                                                   \
            WIDE_BLOCKS(WORK, end)                                                                               \
            for (; n + VECTORS * LANES <= end; n += VECTORS * LANES) {                                           \
                for (int r = 0; r < ROWS; r++) __builtin_prefetch(w + (k + ROWS + r) * outputs + n);             \
                WORK(8, VECTORS);                                                                                \
            }                                                                                                    \
            for (; n + 2 * LANES <= end; n += 2 * LANES) { WORK(8, 2); }                                         \
            for (; n < end; n += LANES) { WORK(8, 1); }                                                          \
        }                                                                                                        \
    }

static Batch behind(Batch of, int64_t k, int64_t n) { return (Batch){of.x + k, of.y + n, of.count}; }

static void start_sums(const Layer *layer, const float *b, Batch of) {
    for (int64_t m = 0; m < of.count; m++) memcpy(of.y + m * layer->outputs, b, sizeof(float) * layer->outputs);
}

static void rectify(const Layer *layer, float *y, int64_t size) {
    for (int64_t k = 0; layer->rectified && k < size; k++) y[k] = y[k] < 0 ? 0 : y[k];
}

static void linear_forward(const Layer *layer, const float *w, const float *b, Batch of) {
    const int64_t inputs = layer->inputs, outputs = layer->outputs;
    start_sums(layer, b, of);
#define FORWARD(width, vectors) block_forward_##width(vectors, w + k * outputs + n, behind(of, k, n), inputs, outputs)
    BLOCKS(FORWARD, 0, inputs)
    rectify(layer, of.y, of.count * outputs);
}

/* The error goes down where there is a layer below to train, and the weights take their step. Where there is none, the
 * next batch can go through them at once: they are read from far once a step instead of twice. */
static void linear_backward(const Layer *layer, const Step step, const Step bias, const Values *own, const float *x,
                            const float *error, float *below, int64_t count, Batch next) {
    const int64_t inputs = layer->inputs, outputs = layer->outputs;
    float *const w = own->weights, *const velocity = own->velocity;
    const float *const shift = own->shift;
    for (int64_t n = 0; layer->biased && !bias.moving && n < outputs; n++) {
        float sum = 0;
        for (int64_t m = 0; m < count; m++) sum += error[m * outputs + n];
        own->biases[n] = bias.kept * own->biases[n] - bias.rate * sum;
        if (own->bias_shift) own->biases[n] -= own->bias_shift[n];
    }
    for (int64_t n = 0; layer->biased && bias.moving && n < outputs; n += LANES) {
        vector sum = begin(bias, bias.fresh, own->biases + n, own->bias_velocity + n,
                           own->bias_shift ? own->bias_shift + n : NULL);
        for (int64_t m = 0; m < count; m++) sum += load(error + m * outputs + n);
        store(own->biases + n, moved(bias, bias.fresh, own->biases + n, own->bias_velocity + n, sum));
    }
    start_sums(layer, own->biases, next);
    for (int64_t first = 0; first < inputs; first += CHUNK) {
        const int64_t last = first + CHUNK < inputs ? first + CHUNK : inputs;
        for (int64_t k = first; below && k < last; k += ROWS) {
            int64_t m = 0;
#ifdef WIDE
            for (; m + 6 <= count; m += 6)
                rows_down_wide(3, w + k * outputs, error + m * outputs, below + m * inputs + k, inputs, outputs);
            for (; m + 2 <= count; m += 2)
                rows_down_wide(1, w + k * outputs, error + m * outputs, below + m * inputs + k, inputs, outputs);
#endif
#define DOWN(samples)                                                                                           \
    for (; m + (samples) <= count; m += (samples))                                                              \
    rows_down(samples, w + k * outputs, error + m * outputs, below + m * inputs + k, inputs, outputs)
            DOWN(3);
            DOWN(1);
        }
#define STEP(width, vectors)                                                                                           \
    block_step_##width(vectors, 0, 0, step, w + k * outputs + n, NULL, shift ? shift + k * outputs + n : NULL, x + k, error + n,     \
               count, behind(next, k, n), inputs, outputs)
#define MOVING_STEP(width, vectors)                                                                                    \
    for (int r = 0; r < ROWS; r++)                                                                              \
        for (int v = 0; v < (vectors); v += 2)                                                                  \
            __builtin_prefetch(velocity + (k + ROWS + r) * outputs + n + v * width);                            \
    block_step_##width(vectors, 1, 0, step, w + k * outputs + n, velocity + k * outputs + n,                                 \
               shift ? shift + k * outputs + n : NULL, x + k, error + n, count, behind(next, k, n), inputs, outputs)
#define FIRST_STEP(width, vectors)                                                                                     \
    block_step_##width(vectors, 1, 1, step, w + k * outputs + n, velocity + k * outputs + n,                              \
               shift ? shift + k * outputs + n : NULL, x + k, error + n, count, behind(next, k, n), inputs, outputs)
        if (step.moving && step.fresh) {
            BLOCKS(FIRST_STEP, first, last)
        } else if (step.moving) {
            BLOCKS(MOVING_STEP, first, last)
        } else {
            BLOCKS(STEP, first, last)
        }
    }
    rectify(layer, next.y, next.count * outputs);
}

/* Rows and columns of a square exchanged: first within pairs, then pairs within fours, then fours. */
INLINE void exchange(vector square[LANES]) {
    vector pairs[LANES], fours[LANES];
    for (int n = 0; n < LANES; n += 2) {
        pairs[n] = __builtin_shufflevector(square[n], square[n + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        pairs[n + 1] = __builtin_shufflevector(square[n], square[n + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int n = 0; n < LANES; n++) {
        if (n % 4 >= 2) continue; /* done with the one two before it */
        fours[n] = __builtin_shufflevector(pairs[n], pairs[n + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        fours[n + 2] = __builtin_shufflevector(pairs[n], pairs[n + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int n = 0; n < LANES / 2; n++) {
        square[n] = __builtin_shufflevector(fours[n], fours[n + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        square[n + 4] = __builtin_shufflevector(fours[n], fours[n + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* ---- layout ---- */

/* Channels of the weights here, with padding, at each spot of an image or of a filter. */
static int64_t stored_inputs(const Layer *layer) {
    return layer->convolution ? layer->inputs : layer->inputs / layer->blocks;
}

/* Between the caller's weights, [output, channel x spot], and those here, [spot, channel, output]: squares at a time, and
 * one by one what is left over. On the way back `before`, laid out as the caller's, is taken off. */
INLINE void turn(const int back, const Layer *layer, const float *from, float *to, const float *before) {
    const int64_t spots = layer->blocks, outputs = layer->own_outputs, stride = layer->outputs;
    const int64_t inputs = layer->own_inputs * spots, stored = stored_inputs(layer);
    for (int64_t input = 0; input < inputs; input += LANES) {
        const int some = inputs - input < LANES ? (int)(inputs - input) : LANES;
        int64_t lines[LANES]; /* where these inputs are, here */
        for (int64_t k = 0; k < some; k++)
            lines[k] = ((input + k) % spots * stored + (input + k) / spots) * stride;
        int64_t n = 0;
        for (; some == LANES && n + LANES <= outputs; n += LANES) {
            vector square[LANES];
            for (int k = 0; k < LANES; k++) square[k] = load(from + (back ? lines[k] + n : (n + k) * inputs + input));
            exchange(square);
            for (int k = 0; before && k < LANES; k++) square[k] -= load(before + (n + k) * inputs + input);
            for (int k = 0; k < LANES; k++) store(to + (back ? (n + k) * inputs + input : lines[k] + n), square[k]);
        }
        for (; n < outputs; n++)
            for (int k = 0; k < some; k++) {
                const int64_t there = n * inputs + input + k, here = lines[k] + n;
                if (back)
                    to[there] = from[here] - (before ? before[there] : 0);
                else
                    to[here] = from[there];
            }
    }
}

/* What was given takes the place of weights and biases. Padding is zero: training that diverged left other values. */
void fedpmt_lay_out(const Net *net, int32_t count) {
    for (int l = 0; l < count; l++) {
        const Layer *layer = net->layers + l;
        const Values *own = net->values + l;
        const int64_t stored = stored_inputs(layer), outputs = layer->outputs;
        const size_t missing = sizeof(float) * (size_t)(outputs - layer->own_outputs);
        if (!own->given) continue;
        for (int64_t block = 0; block < layer->blocks; block++) {
            float *const here = own->weights + block * stored * outputs;
            for (int64_t k = 0; missing && k < layer->own_inputs; k++)
                memset(here + k * outputs + layer->own_outputs, 0, missing);
            memset(here + layer->own_inputs * outputs, 0, sizeof(float) * (stored - layer->own_inputs) * outputs);
        }
        turn(0, layer, own->given, own->weights, NULL);
        if (own->given_bias) memcpy(own->biases, own->given_bias, sizeof(float) * layer->own_outputs);
        memset(own->biases + layer->own_outputs, 0, missing);
    }
}

/* What is wanted of weights and biases; with `changes`, less what was given. */
void fedpmt_hand_back(const Net *net, int32_t count, int32_t changes) {
    for (int l = 0; l < count; l++) {
        const Layer *layer = net->layers + l;
        const Values *own = net->values + l;
        if (own->wanted && changes)
            turn(1, layer, own->weights, own->wanted, own->given);
        else if (own->wanted)
            turn(1, layer, own->weights, own->wanted, NULL);
        for (int64_t n = 0; own->wanted_bias && n < layer->own_outputs; n++)
            own->wanted_bias[n] = own->biases[n] - (changes ? own->given_bias[n] : 0);
    }
}

/* ---- convolutions ---- */

#ifdef WIDE
/* Neighbours in two rows of a picture of one channel, a row in each half of a vector. A pair of numbers is read once for
 * all pixels whose windows it is in, and each sum still takes its terms in the order of `window`. */
INLINE void two_rows(const int pixels, const int segment, const float *image, int64_t line, int rows, const float *w,
                     const float *b, int64_t filters, float *upper, float *lower) {
#define BOTH(first, second) \
    __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    const vector bias = load(b);
    vector_16 sums[PIXELS];
    for (int p = 0; p < pixels; p++) sums[p] = BOTH(bias, bias);
    for (int row = 0; row < rows; row++, image += line, w += segment * filters) {
        vector_16 weights[MOST_COLUMNS];
        for (int k = 0; k < segment; k++) {
            const vector own = load(w + k * filters);
            weights[k] = BOTH(own, own);
            HOLD(weights[k]);
        }
#pragma GCC unroll 16
        for (int n = 0; n < pixels + segment - 1; n++) {
            const float a = image[n], c = image[line + n];
            const vector here = {a, a, a, a, a, a, a, a}, below = {c, c, c, c, c, c, c, c};
            vector_16 pair = BOTH(here, below);
            HOLD(pair);
#pragma GCC unroll 16
            for (int k = 0; k < segment; k++)
                if (n - k >= 0 && n - k < pixels) sums[n - k] += pair * weights[k];
        }
    }
    for (int p = 0; p < pixels; p++) {
        store(upper + p * filters, LOW(sums[p]));
        store(lower + p * filters, HIGH(sums[p]));
    }
}
#endif

static void convolve(const Layer *layer, const Work *work, const float *w, const float *b, const float *image, float *y) {
    const int64_t channels = layer->inputs, filters = layer->outputs, line = layer->width * channels;
    const int64_t segment = layer->kernel_width * channels;
    const int rows = layer->kernel_height;
    for (int64_t f = 0; f < filters;) {
        int64_t taken = f + 2 * LANES <= filters ? 2 * LANES : LANES;
#ifdef WIDE
        if (f + 2 * WIDE <= filters) taken = 2 * WIDE;
#endif
        int i = 0;
#ifdef WIDE
#define TWO_ROWS(pixels, segment)                                                                                \
    for (; j + (pixels) <= work->broad; j += (pixels))                                                           \
    two_rows(pixels, segment, image + i * line + j, line, rows, w + f, b + f, filters, to + j * filters,         \
             to + (work->broad + j) * filters)
        for (; taken == LANES && channels == 1 && (segment == 3 || segment == 5) && i + 2 <= work->high; i += 2) {
            float *to = y + (int64_t)i * work->broad * filters + f;
            int j = 0;
            if (segment == 3) {
                TWO_ROWS(12, 3);
                TWO_ROWS(4, 3);
                TWO_ROWS(1, 3);
            } else {
                TWO_ROWS(12, 5);
                TWO_ROWS(4, 5);
                TWO_ROWS(1, 5);
            }
        }
#endif
        for (; i < work->high; i++) {
            const float *at = image + i * line;
            float *to = y + (int64_t)i * work->broad * filters + f;
            int j = 0;
#define WINDOWS(pixels, width, vectors)                                                                          \
    for (; j + (pixels) <= work->broad; j += (pixels))                                                           \
    window_##width(pixels, vectors, at + j * channels, channels, line, rows, segment, w + f, b + f, filters,     \
                   to + j * filters)
#ifdef WIDE
            if (taken == 2 * WIDE) {
                WINDOWS(10, 16, 2);
                WINDOWS(4, 16, 2);
                WINDOWS(1, 16, 2);
            } else if (taken == WIDE) {
                if (work->broad % 14 == 0) WINDOWS(14, 16, 1);
                WINDOWS(12, 16, 1);
                WINDOWS(8, 16, 1);
                WINDOWS(4, 16, 1);
                WINDOWS(1, 16, 1);
            }
#endif
            if (taken == 2 * LANES) {
                WINDOWS(6, 8, 2);
                WINDOWS(4, 8, 2);
                WINDOWS(2, 8, 2);
                WINDOWS(1, 8, 2);
            } else if (taken == LANES) {
                WINDOWS(12, 8, 1);
                WINDOWS(8, 8, 1);
                WINDOWS(4, 8, 1);
                WINDOWS(1, 8, 1);
            }
        }
        f += taken;
    }
}

INLINE vector pick(whole mask, vector yes, vector no) {
    return (vector)(((whole)yes & mask) | ((whole)no & ~mask));
}

/* The largest of each two by two, cut at zero where the layer is rectified; `places` says which it was, where that will
 * be asked on the way back. */
INLINE void pool(const int placed, const Layer *layer, const Work *work, const float *from, float *to, int32_t *places) {
    const int64_t filters = layer->outputs, line = work->broad * filters;
    const vector zero = {0};
    for (int i = 0; i + 2 <= work->high; i += 2)
        for (int j = 0; j + 2 <= work->broad; j += 2, to += filters) {
            const float *at = from + i * line + j * filters;
            for (int64_t f = 0; f < filters; f += LANES) {
                const vector a = load(at + f), b = load(at + filters + f);
                const vector c = load(at + line + f), d = load(at + line + filters + f);
                const whole above = b > a, below = d > c;
                const vector first = pick(above, b, a), second = pick(below, d, c);
                const whole lower = second > first;
                const vector largest = pick(lower, second, first);
                store(to + f, layer->rectified ? pick(largest < zero, zero, largest) : largest);
                if (placed) *(whole *)(places + f) = (lower & (2 - below)) | (~lower & -above);
            }
            if (placed) places += filters;
        }
}

static void convolution_forward(const Layer *layer, const Work *work, const float *w, const float *b, const float *x,
                                float *y, int32_t *places, int64_t count) {
    const int64_t size = (int64_t)layer->height * layer->width * layer->inputs;
    for (int64_t m = 0; m < count; m++) {
        float *own = y + m * work->pooled;
        convolve(layer, work, w, b, x + m * size, layer->pooled ? work->unpooled : own);
        if (layer->pooled && places) {
            pool(1, layer, work, work->unpooled, own, places + m * work->pooled);
        } else if (layer->pooled) {
            pool(0, layer, work, work->unpooled, own, NULL);
        } else {
            rectify(layer, own, work->size);
        }
    }
}

/* ROWS x VECTORS of a filter's gradient, kept in registers over all its entries. Rows are taken in whole vectors: what
 * lies behind a window goes to the gradient's padding (buffers have SLACK). */
INLINE void gather(const int rows, const int vectors, const Entry *entries, int64_t count, const float *x, int64_t line,
                   float *gradient, int64_t stride) {
    vector sums[GRADIENT_ROWS][GRADIENT_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = load(gradient + r * stride + v * LANES);
    for (int64_t n = 0; n < count; n++) {
        const float *at = x + entries[n].at;
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sums[r][v] += entries[n].error * load(at + r * line + v * LANES);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(gradient + r * stride + v * LANES, sums[r][v]);
}

#ifdef WIDE
/* The same with wide vectors, all rows at once, and `tails` vectors of LANES behind them. */
INLINE void gather_wide(const int vectors, const int tails, const Entry *entries, int64_t count, const float *x,
                        int64_t line, float *gradient, int64_t stride) {
    vector_16 sums[GRADIENT_ROWS][GRADIENT_VECTORS / 2];
    vector rest[GRADIENT_ROWS];
    for (int r = 0; r < GRADIENT_ROWS; r++) {
        for (int v = 0; v < vectors; v++) sums[r][v] = load_16(gradient + r * stride + v * WIDE);
        if (tails) rest[r] = load(gradient + r * stride + vectors * WIDE);
    }
    for (int64_t n = 0; n < count; n++) {
        const float *at = x + entries[n].at;
        for (int r = 0; r < GRADIENT_ROWS; r++, at += line) {
            for (int v = 0; v < vectors; v++) sums[r][v] += entries[n].error * load_16(at + v * WIDE);
            if (tails) rest[r] += entries[n].error * load(at + vectors * WIDE);
        }
    }
    for (int r = 0; r < GRADIENT_ROWS; r++) {
        for (int v = 0; v < vectors; v++) store_16(gradient + r * stride + v * WIDE, sums[r][v]);
        if (tails) store(gradient + r * stride + vectors * WIDE, rest[r]);
    }
}
#endif

static void filter_gradient(const Entry *entries, int64_t count, const float *x, int rows, int64_t line, float *gradient,
                            int64_t stride) {
#ifdef WIDE
#define GATHER_WIDE(vectors, tails)                                                       \
    if (rows == GRADIENT_ROWS && stride == (vectors)*WIDE + (tails)*LANES) {              \
        gather_wide(vectors, tails, entries, count, x, line, gradient, stride);           \
        return;                                                                           \
    }
    GATHER_WIDE(1, 0)
    GATHER_WIDE(2, 1)
    GATHER_WIDE(5, 0)
#endif
    if (rows == 5 && stride == LANES) {
        gather(5, 1, entries, count, x, line, gradient, stride);
        return;
    }
    if (rows == 5 && stride == 2 * LANES) {
        gather(5, 2, entries, count, x, line, gradient, stride);
        return;
    }
    for (int row = 0; row < rows; row++, x += line, gradient += stride) {
        int64_t k = 0;
#define GATHER(vectors)                                                     \
    for (; k + (vectors)*LANES <= stride; k += (vectors)*LANES)             \
    gather(1, vectors, entries, count, x + k, line, gradient + k, stride)
        GATHER(10);
        GATHER(5);
        GATHER(2);
        GATHER(1);
    }
}

/* Down through a filter: zeros are added behind its window. */
INLINE void scatter(const int vectors, const Entry *entries, int64_t count, float *below, int rows, int64_t line,
                    const float *turned, int64_t stride) {
    for (int64_t n = 0; n < count; n++) {
        const float error = entries[n].error;
        for (int row = 0; row < rows; row++) {
            float *to = below + entries[n].at + row * line;
            const float *weights = turned + row * stride;
            for (int64_t k = 0; k < (vectors ? vectors * LANES : stride); k += LANES)
                store(to + k, load(to + k) + error * load(weights + k));
        }
    }
}

#ifdef WIDE
INLINE void scatter_wide(const int vectors, const int tails, const Entry *entries, int64_t count, float *below,
                         int64_t line, const float *turned, int64_t stride) {
    for (int64_t n = 0; n < count; n++) {
        float *to = below + entries[n].at;
        const float error = entries[n].error, *weights = turned;
        for (int row = 0; row < GRADIENT_ROWS; row++, to += line, weights += stride) {
            for (int v = 0; v < vectors; v++)
                store_16(to + v * WIDE, load_16(to + v * WIDE) + error * load_16(weights + v * WIDE));
            if (tails) store(to + vectors * WIDE, load(to + vectors * WIDE) + error * load(weights + vectors * WIDE));
        }
    }
}
#endif

/* The nonzero errors of one sample, filter by filter; each filter has `room` for all of its own. */
static void collect(const Layer *layer, const Work *work, const float *error, const int32_t *places, int64_t room) {
    const int64_t channels = layer->inputs, filters = layer->outputs, line = layer->width * channels;
    const int step = layer->pooled ? 2 : 1;
    memset(work->counts, 0, sizeof(int64_t) * filters);
    for (int i = 0; i + step <= work->high; i += step)
        for (int j = 0; j + step <= work->broad; j += step, error += filters, places += filters)
            for (int64_t f = 0; f < filters; f++) {
                /* Always written and counted only if it is something: no branch to be guessed wrong. */
                const int place = step == 2 ? places[f] : 0;
                Entry *own = work->entries + f * room + work->counts[f];
                own->at = (i + (place >> 1)) * line + (j + (place & 1)) * channels;
                own->error = error[f];
                work->counts[f] += error[f] != 0;
            }
}

/* One weight of each filter takes its step, from entry `at` on; their gradients are `apart` from each other. */
INLINE void step_filters(const Step step, const Values *own, int64_t at, int64_t filters, const float *gradient,
                         int64_t apart) {
    float *const w = own->weights + at, *const velocity = own->velocity + at;
    const float *const shift = own->shift ? own->shift + at : NULL;
    for (int64_t f = 0; !step.moving && f < filters; f++) {
        w[f] = step.kept * w[f] - step.rate * gradient[f * apart];
        if (shift) w[f] -= shift[f];
    }
    for (int64_t f = 0; step.moving && f < filters; f += LANES) {
        vector sum = begin(step, step.fresh, w + f, velocity + f, shift ? shift + f : NULL);
        for (int n = 0; n < LANES; n++) sum[n] += gradient[(f + n) * apart];
        store(w + f, moved(step, step.fresh, w + f, velocity + f, sum));
    }
}

static void convolution_backward(const Layer *layer, const Work *work, const Step step, const Step bias_step,
                                 const Values *own, const float *x, const float *error, const int32_t *places,
                                 float *below, int64_t count) {
    float *const w = own->weights;
    const int64_t filters = layer->outputs, line = (int64_t)layer->width * layer->inputs;
    const int64_t segment = (int64_t)layer->kernel_width * layer->inputs, stride = padded(segment);
    const int64_t rows = layer->kernel_height, size = layer->height * line, room = work->pooled / filters + 1;
    float *bias = work->gradient + filters * rows * stride;
    memset(work->gradient, 0, sizeof(float) * (filters * rows * stride + filters));
    if (below) {
        memset(below, 0, sizeof(float) * count * size);
        for (int64_t f = 0; f < filters; f++)
            for (int64_t row = 0; row < rows; row++)
                for (int64_t k = 0; k < segment; k++)
                    work->turned[(f * rows + row) * stride + k] = w[(row * segment + k) * filters + f];
    }
    for (int64_t m = 0; m < count; m++) {
        collect(layer, work, error + m * work->pooled, places + m * work->pooled, room);
        for (int64_t f = 0; f < filters; f++) {
            const Entry *entries = work->entries + f * room;
            const int64_t some = work->counts[f];
            const float *turned = work->turned + f * rows * stride;
            for (int64_t n = 0; n < some; n++) bias[f] += entries[n].error;
            filter_gradient(entries, some, x + m * size, (int)rows, line, work->gradient + f * rows * stride, stride);
#ifdef WIDE
            if (below && rows == GRADIENT_ROWS && stride == 5 * WIDE)
                scatter_wide(5, 0, entries, some, below + m * size, line, turned, stride);
            else if (below && rows == GRADIENT_ROWS && stride == 2 * WIDE + LANES)
                scatter_wide(2, 1, entries, some, below + m * size, line, turned, stride);
            else
#endif
            if (below && stride == 10 * LANES)
                scatter(10, entries, some, below + m * size, (int)rows, line, turned, stride);
            else if (below && stride == 5 * LANES)
                scatter(5, entries, some, below + m * size, (int)rows, line, turned, stride);
            else if (below)
                scatter(0, entries, some, below + m * size, (int)rows, line, turned, stride);
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < segment; k++)
            step_filters(step, own, (row * segment + k) * filters, filters, work->gradient + row * stride + k,
                         rows * stride);
    if (layer->biased)
        step_filters(bias_step,
                     &(Values){.weights = own->biases, .velocity = own->bias_velocity, .shift = own->bias_shift}, 0,
                     filters, bias, 1);
}

/* ---- the chain ---- */

static int64_t input_size(const Layer *layer) {
    return layer->convolution ? (int64_t)layer->height * layer->width * layer->inputs : layer->inputs;
}

static void forward(Net net, const Work *work, int first, int last, const float *x, int64_t count) {
    for (int l = first; l < last; l++) {
        const Layer *layer = net.layers + l;
        const Values *own = net.values + l;
        if (layer->convolution)
            convolution_forward(layer, work + l, own->weights, own->biases, x, work[l].outputs, work[l].places, count);
        else
            linear_forward(layer, own->weights, own->biases, (Batch){x, work[l].outputs, count});
        x = work[l].outputs;
    }
}

/* (softmax(z) - y) / n in place of z; gives the mean loss. An absent class keeps a share, but gets no error. */
static double loss_and_error(float *z, const int64_t *labels, const int64_t *rows, const int64_t *order, int64_t count,
                             int classes, int64_t stride, const uint8_t *absent) {
    double sum = 0;
    for (int64_t m = 0; m < count; m++) {
        float *own = z + m * stride, largest, shares = 0;
        const int64_t label = labels[rows ? rows[order[m]] : order[m]];
        for (int c = 0; absent && c < classes; c++) own[c] = absent[c] ? 0 : own[c];
        largest = own[0];
        for (int c = 1; c < classes; c++) largest = own[c] > largest ? own[c] : largest;
        for (int c = 0; c < classes; c++) shares += expf(own[c] - largest);
        sum += (double)(logf(shares) - (own[label] - largest));
        for (int c = 0; c < classes; c++)
            own[c] = (expf(own[c] - largest) / shares - (c == label ? 1.0f : 0.0f)) / (float)count;
        for (int c = 0; absent && c < classes; c++) own[c] = absent[c] ? 0 : own[c];
        for (int64_t c = classes; c < stride; c++) own[c] = 0;
    }
    return sum / (double)count;
}

/* Zeros that begin with a cache line: a vector that lies across two lines costs two reads. */
static void *zeros(int64_t count, size_t size) {
    const size_t bytes = ((size_t)count * size + 63) / 64 * 64;
    void *made = aligned_alloc(64, bytes);
    return made ? memset(made, 0, bytes) : NULL;
}

/* Room for `block` samples in frozen layers and for `batch` in those that are trained. */
static Work *prepare(const Layer *layers, int count, int frozen, int64_t block, int64_t batch) {
    Work *work = calloc((size_t)count, sizeof(Work));
    for (int l = 0; work && l < count; l++) {
        const Layer *layer = layers + l;
        Work *own = work + l;
        own->size = own->pooled = layer->outputs;
        if (layer->convolution) {
            own->high = layer->height - layer->kernel_height + 1;
            own->broad = layer->width - layer->kernel_width + 1;
            own->size = (int64_t)own->high * own->broad * layer->outputs;
            own->pooled = layer->pooled ? (int64_t)(own->high / 2) * (own->broad / 2) * layer->outputs : own->size;
            const int64_t filters =
                (int64_t)layer->outputs * layer->kernel_height * padded((int64_t)layer->kernel_width * layer->inputs);
            own->unpooled = zeros(own->size, sizeof(float));
            if (l >= frozen) {
                own->places = zeros(batch * own->pooled, sizeof(int32_t));
                own->gradient = zeros(filters + layer->outputs, sizeof(float));
                own->turned = zeros(filters, sizeof(float));
                own->entries = zeros(own->pooled + layer->outputs, sizeof(Entry));
                own->counts = zeros(layer->outputs, sizeof(int64_t));
            }
        }
        own->outputs = zeros((l < frozen ? block : batch) * own->pooled + SLACK, sizeof(float));
        /* The error at this layer's input; none goes below the first trained layer. */
        if (l > frozen) own->errors = zeros(batch * input_size(layer) + SLACK, sizeof(float));
    }
    return work;
}

static void release(Work *work, int count) {
    for (int l = 0; work && l < count; l++) {
        free(work[l].outputs);
        free(work[l].unpooled);
        free(work[l].errors);
        free(work[l].places);
        free(work[l].gradient);
        free(work[l].turned);
        free(work[l].entries);
        free(work[l].counts);
    }
    free(work);
}

static int complete(const Layer *layers, const Work *work, int count, int frozen) {
    for (int l = 0; work && l < count; l++) {
        const Work *own = work + l;
        if (!own->outputs || (l > frozen && !own->errors)) return 0;
        if (layers[l].convolution && !own->unpooled) return 0;
        if (layers[l].convolution && l >= frozen &&
            (!own->places || !own->gradient || !own->turned || !own->entries || !own->counts))
            return 0;
    }
    return work != NULL;
}

static void backward(Net net, const Work *work, const Plan *plan, int fresh, const float *x, int64_t count, Batch next) {
    const Batch nothing = {NULL, NULL, 0};
    float *error = work[plan->layers - 1].outputs; /* the last layer's outputs were turned into their error */
    for (int l = plan->layers - 1; l >= plan->frozen; l--) {
        const Layer *layer = net.layers + l;
        const Values *own = net.values + l;
        const Step step = step_of(plan, layer->gain, fresh), bias = step_of(plan, layer->bias_gain, fresh);
        const int wanted = l > plan->frozen;
        const float *inputs = wanted ? work[l - 1].outputs : x;
        float *below = wanted ? work[l].errors : NULL;
        if (layer->convolution)
            convolution_backward(layer, work + l, step, bias, own, inputs, error, work[l].places, below, count);
        else
            linear_backward(layer, step, bias, own, inputs, error, below, count, wanted ? nothing : next);
        if (wanted && net.layers[l - 1].rectified) {
            const int64_t size = count * work[l - 1].pooled;
            for (int64_t k = 0; k < size; k++) below[k] = inputs[k] > 0 ? below[k] : 0;
        }
        error = below;
    }
}

/* The samples of one step: where its order begins, and how many there are. */
static const int64_t *samples_of(const Plan *plan, const int64_t *order, int64_t step, int64_t *count) {
    const int64_t each = (plan->samples + plan->batch - 1) / plan->batch; /* steps an epoch */
    const int64_t begin = step % each * plan->batch, left = plan->samples - begin;
    *count = left < plan->batch ? left : plan->batch;
    return order + step / each * plan->samples + begin;
}

static void gather_samples(float *to, const float *from, const int64_t *rows, const int64_t *order, int64_t count,
                           int64_t size) {
    for (int64_t s = 0; s < count; s++)
        memcpy(to + s * size, from + (rows ? rows[order[s]] : order[s]) * size, sizeof(float) * size);
}

/* A narrow layer's tensor from the leading channels of a wide one's, or back; padding is left alone. */
static void copy_corner(const Layer *thin, const Layer *wide, float *narrow, float *whole, int back) {
    const int64_t thin_inputs = stored_inputs(thin), wide_inputs = stored_inputs(wide);
    for (int64_t block = 0; block < thin->blocks; block++)
        for (int64_t k = 0; k < thin->own_inputs; k++) {
            float *own = narrow + (block * thin_inputs + k) * thin->outputs;
            float *theirs = whole + (block * wide_inputs + k) * wide->outputs;
            memcpy(back ? theirs : own, back ? own : theirs, sizeof(float) * thin->own_outputs);
        }
}

/* The weights of a narrow net from those of the wide one that it is a corner of, or back, velocities with them. */
static void copy_net(Net thin, Net wide, int count, int back) {
    for (int l = 0; l < count; l++) {
        const Layer *layer = thin.layers + l;
        const Values *own = thin.values + l, *theirs = wide.values + l;
        const size_t size = sizeof(float) * layer->own_outputs;
        copy_corner(layer, wide.layers + l, own->weights, theirs->weights, back);
        memcpy(back ? theirs->biases : own->biases, back ? own->biases : theirs->biases, size);
        if (!own->velocity || !theirs->velocity) continue;
        copy_corner(layer, wide.layers + l, own->velocity, theirs->velocity, back);
        memcpy(back ? theirs->bias_velocity : own->bias_velocity, back ? own->bias_velocity : theirs->bias_velocity, size);
    }
}

/* The local round of one device: the mean loss over its steps, negative where there is no memory. Weights are given to
 * the last of `nets`, changed in its place, and handed back by it. `order` holds the samples of every epoch; `rows` maps
 * a sample to its row in `inputs` and `labels`, NULL where these are the same. The nets before the last are corners of
 * it, narrowest first; `draws` says which of all takes each step, and is NULL where the last takes all. */
double fedpmt_train(const Plan *plan, const Net *nets, const int32_t *draws, const float *inputs, const int64_t *labels,
                    const int64_t *rows, const int64_t *order) {
    const int count = plan->layers, frozen = plan->frozen, widest = plan->nets - 1;
    const Net whole = nets[widest];
    const int64_t batch = plan->batch < plan->samples ? plan->batch : plan->samples;
    const int64_t whole_epochs = plan->epochs * ((plan->samples + plan->batch - 1) / plan->batch);
    const int64_t steps = plan->limit >= 0 && plan->limit < whole_epochs ? plan->limit : whole_epochs;
    const int64_t seen = steps * plan->batch < plan->samples ? steps * plan->batch : plan->samples;
    const int64_t size = input_size(whole.layers), cut = input_size(whole.layers + frozen);
    /* Outputs of frozen layers that take no more room than the samples themselves are kept in any case: many samples at
     * a time go through these layers in less time. */
    const int keeps = frozen && (plan->cached || (!draws && cut <= size)), first = keeps ? frozen : 0;
    const int64_t hidden = keeps ? cut : size, block = keeps && batch < KEPT ? KEPT : batch;
    /* Nothing is trained below a linear first layer: the next batch can go through it as soon as it took its step. */
    const int ahead = !draws && frozen == first && !whole.layers[first].convolution && count > first + 1;
    Work **works = calloc((size_t)plan->nets, sizeof(Work *));
    float *cache = keeps ? malloc(sizeof(float) * plan->samples * hidden) : NULL; /* what is read was written */
    const int64_t room = block * size > batch * hidden ? block * size : batch * hidden;
    float *gathered = zeros(2 * room + SLACK, sizeof(float));
    float *now = gathered, *then = gathered + room;
    double sum = -1;
    fedpmt_lay_out(nets + widest, count);
    if (!works || !gathered || (keeps && !cache)) goto done;
    for (int n = 0; n <= widest; n++) {
        works[n] = prepare(nets[n].layers, count, frozen, block, batch);
        if (!complete(nets[n].layers, works[n], count, frozen)) goto done;
    }
    sum = 0;
    for (int64_t m = 0; keeps && m < seen; m += block) {
        const int64_t some = m + block <= seen ? block : seen - m;
        gather_samples(now, inputs, rows, order + m, some, size);
        forward(whole, works[widest], 0, frozen, now, some);
        const float *outputs = works[widest][frozen - 1].outputs;
        for (int64_t s = 0; s < some; s++)
            memcpy(cache + order[m + s] * hidden, outputs + s * hidden, sizeof(float) * hidden);
    }
    const float *source = keeps ? cache : inputs;
    const int64_t *held = keeps ? NULL : rows; /* where samples are in `source` */
    for (int64_t step = 0; step < steps; step++) {
        const int drawn = draws ? draws[step] : widest;
        const Net net = nets[drawn];
        Work *const work = works[drawn];
        int64_t some;
        const int64_t *own = samples_of(plan, order, step, &some);
        Batch next = {NULL, NULL, 0};
        if (drawn < widest) copy_net(net, whole, count, 0);
        if (ahead && step > 0) {
            forward(net, work, first + 1, count, work[first].outputs, some);
        } else {
            gather_samples(now, source, held, own, some, hidden);
            forward(net, work, first, count, now, some);
        }
        sum += loss_and_error(work[count - 1].outputs, labels, rows, own, some, plan->classes,
                              net.layers[count - 1].outputs, plan->absent);
        if (ahead && step + 1 < steps) {
            const int64_t *others = samples_of(plan, order, step + 1, &next.count);
            gather_samples(then, source, held, others, next.count, hidden);
            next.x = then;
            next.y = work[first].outputs;
        }
        /* Where widths are drawn, velocities come as zeros: a corner may take its first step later. */
        backward(net, work, plan, step == 0 && !draws, frozen > first ? work[frozen - 1].outputs : now, some, next);
        if (drawn < widest) copy_net(net, whole, count, 1);
        float *const swapped = now;
        now = then;
        then = swapped;
    }
    fedpmt_hand_back(nets + widest, count, plan->changes);
done:
    for (int n = 0; works && n <= widest; n++) release(works[n], count);
    free(works);
    free(cache);
    free(gathered);
    return steps && sum >= 0 ? sum / (double)steps : sum;
}

/* The outputs of some samples, `block` of them at a time; 0 where there is no memory. */
int32_t fedpmt_forward(const Net *net, int32_t count, const float *inputs, int64_t samples, int64_t block,
                       float *outputs) {
    const int64_t size = input_size(net->layers), stride = net->layers[count - 1].outputs;
    Work *work = prepare(net->layers, count, count, block, 0);
    fedpmt_lay_out(net, count);
    const int fine = complete(net->layers, work, count, count);
    for (int64_t m = 0; fine && m < samples; m += block) {
        const int64_t some = m + block <= samples ? block : samples - m;
        forward(*net, work, 0, count, inputs + m * size, some);
        memcpy(outputs + m * stride, work[count - 1].outputs, sizeof(float) * some * stride);
    }
    release(work, count);
    return fine;
}

/* A forward pass and the way back, for losses that are not known here: room for a batch, NULL where there is none. */
Work *fedpmt_prepare(const Net *net, int32_t count, int64_t batch) {
    Work *work = prepare(net->layers, count, 0, 0, batch);
    if (complete(net->layers, work, count, 0)) return work;
    release(work, count);
    return NULL;
}

void fedpmt_release(Work *work, int32_t count) { release(work, count); }

void fedpmt_outputs(const Net *net, Work *work, int32_t count, const float *inputs, int64_t samples, float *outputs) {
    fedpmt_lay_out(net, count);
    forward(*net, work, 0, count, inputs, samples);
    memcpy(outputs, work[count - 1].outputs, sizeof(float) * samples * net->layers[count - 1].outputs);
}

/* Gradients in the place of weights and biases, handed back: a step of length -1 that leaves nothing of them. */
void fedpmt_gradients(const Net *net, Work *work, int32_t count, const float *inputs, int64_t samples,
                      const float *errors) {
    const Plan plan = {.layers = count, .rate = -1, .kept = 0};
    memcpy(work[count - 1].outputs, errors, sizeof(float) * samples * net->layers[count - 1].outputs);
    backward(*net, work, &plan, 0, inputs, samples, (Batch){NULL, NULL, 0});
    fedpmt_hand_back(net, count, 0);
}

/* ---- aggregation ---- */

#define ENTRIES 8192

/* sums += shares[k] * replies[k], reply after reply in this order; from zero where `fresh`. */
void fedpmt_fold(float *sums, const float *const *replies, const float *shares, int32_t count, int64_t entries,
                 int32_t fresh) {
    if (fresh) memset(sums, 0, sizeof(float) * entries);
    for (int64_t first = 0; first < entries; first += ENTRIES) {
        const int64_t last = first + ENTRIES < entries ? first + ENTRIES : entries;
        for (int k = 0; k < count; k++) {
            const float *own = replies[k], share = shares[k];
            if (share == 1) {
                for (int64_t j = first; j < last; j++) sums[j] += own[j];
            } else {
                /* By way of memory, so that product and sum are rounded each for itself, as torch does it. */
                float steps[ENTRIES];
                for (int64_t j = first; j < last; j++) steps[j - first] = share * own[j];
                for (int64_t j = first; j < last; j++) sums[j] += steps[j - first];
            }
        }
    }
}

/* new = weights + (0 + share * reply) / divisor of each of `count` tensors: the bits of fedpmt_fold, a division and a sum,
 * in one pass over memory. The zero keeps the product from being contracted with the last sum. */
void fedpmt_step(float *const *new, const float *const *weights, const float *const *replies, const float *shares,
                 const float *divisors, const int64_t *entries, int32_t count) {
    for (int k = 0; k < count; k++) {
        float *restrict to = new[k];
        const float *restrict from = weights[k], *restrict own = replies[k];
        const float share = shares[k], divisor = divisors[k];
        if (divisor == 1) {
            for (int64_t j = 0; j < entries[k]; j++) to[j] = (0.0f + share * own[j]) + from[j];
        } else {
            for (int64_t j = 0; j < entries[k]; j++) to[j] = (0.0f + share * own[j]) / divisor + from[j];
        }
    }
}

/* sums += values and covers += weight at some rows and columns of a tensor whose entries are runs of `inner`. */
void fedpmt_add_at(float *sums, float *covers, const float *values, float weight, const int64_t *rows, int64_t height,
                   const int64_t *columns, int64_t width, int64_t row_length, int64_t inner) {
    for (int64_t row = 0; row < height; row++) {
        for (int64_t column = 0; column < width; column++, values += inner) {
            const int64_t first = rows[row] * row_length + columns[column] * inner;
            for (int64_t j = 0; j < inner; j++) {
                sums[first + j] += values[j];
                covers[first + j] += weight;
            }
        }
    }
}

/* ---- the interface ---- */

#define AT(type, field) offsetof(type, field)

/* What the caller must know by heart, to be compared before anything else is called: the version, LANES, and the size of
 * each structure and where its fields begin. How many numbers there are; no more than `room` are written. */
int32_t fedpmt_interface(int64_t *numbers, int32_t room) {
    static const int64_t known[] = {
        VERSION, LANES,
        sizeof(Layer), AT(Layer, convolution), AT(Layer, inputs), AT(Layer, outputs), AT(Layer, height),
        AT(Layer, width), AT(Layer, kernel_height), AT(Layer, kernel_width), AT(Layer, pooled), AT(Layer, rectified),
        AT(Layer, biased), AT(Layer, blocks), AT(Layer, own_inputs), AT(Layer, own_outputs), AT(Layer, gain),
        AT(Layer, bias_gain),
        sizeof(Values), AT(Values, weights), AT(Values, biases), AT(Values, velocity), AT(Values, bias_velocity),
        AT(Values, shift), AT(Values, bias_shift), AT(Values, given), AT(Values, given_bias), AT(Values, wanted),
        AT(Values, wanted_bias),
        sizeof(Net), AT(Net, layers), AT(Net, values),
        sizeof(Plan), AT(Plan, layers), AT(Plan, frozen), AT(Plan, cached), AT(Plan, classes), AT(Plan, nets),
        AT(Plan, moving), AT(Plan, nesterov), AT(Plan, changes), AT(Plan, samples), AT(Plan, epochs), AT(Plan, batch),
        AT(Plan, limit), AT(Plan, rate), AT(Plan, kept), AT(Plan, momentum), AT(Plan, decay), AT(Plan, absent),
    };
    const int32_t count = (int32_t)(sizeof known / sizeof *known);
    for (int32_t n = 0; n < count && n < room; n++) numbers[n] = known[n];
    return count;
}
