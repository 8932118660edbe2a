/* Local SGD on a chain of common layers, one device on one core: what `fused.py` does, without an interpreter between
 * its steps. Compiled on first use (see native.py); nothing but the C library is needed.
 *
 * Layout. Images are channels-last; channels and features are padded with zeros to a multiple of LANES, and padded
 * weights are zero and stay so. A convolution's filters are [row, column x channel, filter], a linear layer's weights
 * [output, input].
 *
 * Where the time goes. Products keep a block of sums in registers. Behind a max-pool and a ReLU most of the error
 * signal is zero (three quarters and about half of the rest), so convolutions go backward one nonzero entry at a time.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
#define SLACK LANES
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float half __attribute__((vector_size(2 * LANES), aligned(4), may_alias));
typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    int32_t convolution, inputs, outputs;          /* channels or features, padded but for the data's own */
    int32_t height, width, kernel_height, kernel_width; /* of a convolution's input, and its window */
    int32_t pooled, rectified, biased;
} Layer;

typedef struct {
    int32_t layers, frozen, cached, classes;
    int64_t samples, epochs, batch, limit; /* limit: steps, negative for none */
    float rate, kept;                      /* eta, and 1 - eta * lambda */
} Plan;

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

INLINE vector load(const float *from) { return *(const vector *)from; }
INLINE void store(float *to, vector value) { *(vector *)to = value; }
INLINE int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }
INLINE float total(vector value) {
    const half sum = *(half *)&value + *((half *)&value + 1);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* ---- linear layers ---- */

/* y[m][n] = x[m] . w[n] + b[n] for SAMPLES x 4 of them; the weights of the next four are called for meanwhile. */
INLINE void dots(const int samples, const float *x, int64_t inputs, const float *w, const float *ahead, const float *b,
                 float *y, int64_t outputs, int rectified) {
    vector sums[3][4];
    for (int m = 0; m < samples; m++)
        for (int n = 0; n < 4; n++) sums[m][n] = (vector){0};
    for (int64_t k = 0; k < inputs; k += LANES) {
        vector weights[4];
        __builtin_prefetch(ahead + k);
        for (int n = 0; n < 4; n++) weights[n] = load(w + n * inputs + k);
        for (int m = 0; m < samples; m++) {
            vector value = load(x + m * inputs + k);
            for (int n = 0; n < 4; n++) sums[m][n] += value * weights[n];
        }
    }
    for (int m = 0; m < samples; m++)
        for (int n = 0; n < 4; n++) {
            float value = total(sums[m][n]) + b[n];
            y[m * outputs + n] = rectified && value < 0 ? 0 : value;
        }
}

static void linear_forward(const Layer *layer, const float *w, const float *b, const float *x, float *y, int64_t count) {
    const int64_t inputs = layer->inputs, outputs = layer->outputs;
    for (int64_t n = 0; n < outputs; n += 4, w += 4 * inputs) {
        int64_t m = 0, next = 4;
#define DOTS(samples)                                                                                             \
    for (; m + (samples) <= count; m += (samples), next += next < 7)                                              \
    dots(samples, x + m * inputs, inputs, w, w + next * inputs, b + n, y + m * outputs + n, outputs, layer->rectified)
        DOTS(3);
        DOTS(2);
        DOTS(1);
    }
}

/* The error goes down through four rows of weights. */
INLINE void rows_down(const int vectors, const float *w, int64_t inputs, const float *error, int64_t outputs,
                      float *below, int64_t count) {
    vector rows[4][2];
    for (int r = 0; r < 4; r++)
        for (int v = 0; v < vectors; v++) rows[r][v] = load(w + r * inputs + v * LANES);
    for (int64_t m = 0; m < count; m++, error += outputs, below += inputs)
        for (int v = 0; v < vectors; v++) {
            vector sum = load(below + v * LANES);
            for (int r = 0; r < 4; r++) sum += error[r] * rows[r][v];
            store(below + v * LANES, sum);
        }
}

/* Then they take their step, while they are in the cache. */
INLINE void rows_step(const int vectors, const Plan *plan, float *w, int64_t inputs, const float *x, const float *error,
                      int64_t outputs, int64_t count) {
    vector steps[4][2];
    for (int r = 0; r < 4; r++)
        for (int v = 0; v < vectors; v++) steps[r][v] = (vector){0};
    for (int64_t m = 0; m < count; m++, error += outputs, x += inputs)
        for (int v = 0; v < vectors; v++) {
            const vector value = load(x + v * LANES);
            for (int r = 0; r < 4; r++) steps[r][v] += error[r] * value;
        }
    for (int r = 0; r < 4; r++)
        for (int v = 0; v < vectors; v++) {
            float *at = w + r * inputs + v * LANES;
            store(at, plan->kept * load(at) - plan->rate * steps[r][v]);
        }
}

static void linear_backward(const Layer *layer, const Plan *plan, float *w, float *b, const float *x, const float *error,
                            float *below, int64_t count) {
    const int64_t inputs = layer->inputs, outputs = layer->outputs;
    if (below) memset(below, 0, sizeof(float) * count * inputs);
    for (int64_t n = 0; n < outputs; n += 4, w += 4 * inputs) {
        for (int r = 0; layer->biased && r < 4; r++) {
            float sum = 0;
            for (int64_t m = 0; m < count; m++) sum += error[m * outputs + n + r];
            b[n + r] = plan->kept * b[n + r] - plan->rate * sum;
        }
        int64_t k = 0;
#define ROWS(vectors)                                                                           \
    for (; k + (vectors)*LANES <= inputs; k += (vectors)*LANES) {                               \
        if (below) rows_down(vectors, w + k, inputs, error + n, outputs, below + k, count);     \
        rows_step(vectors, plan, w + k, inputs, x + k, error + n, outputs, count);              \
    }
        ROWS(2);
        ROWS(1);
    }
}

/* ---- convolutions ---- */

/* PIXELS neighbours in a row, VECTORS x LANES filters of each. */
INLINE void window(const int pixels, const int vectors, const float *image, int64_t channels, int64_t line, int rows,
                   int64_t segment, const float *w, const float *b, int64_t filters, float *y) {
    vector sums[12][2];
    for (int p = 0; p < pixels; p++)
        for (int v = 0; v < vectors; v++) sums[p][v] = load(b + v * LANES);
    for (int row = 0; row < rows; row++) {
        const float *at = image + row * line;
        for (int64_t k = 0; k < segment; k++, w += filters) {
            vector weights[2];
            for (int v = 0; v < vectors; v++) weights[v] = load(w + v * LANES);
            for (int p = 0; p < pixels; p++)
                for (int v = 0; v < vectors; v++) sums[p][v] += at[p * channels + k] * weights[v];
        }
    }
    for (int p = 0; p < pixels; p++)
        for (int v = 0; v < vectors; v++) store(y + p * filters + v * LANES, sums[p][v]);
}

static void convolve(const Layer *layer, const Work *work, const float *w, const float *b, const float *image, float *y) {
    const int64_t channels = layer->inputs, filters = layer->outputs, line = layer->width * channels;
    const int64_t segment = layer->kernel_width * channels;
    const int rows = layer->kernel_height;
    for (int64_t f = 0; f < filters;) {
        const int vectors = f + 2 * LANES <= filters ? 2 : 1;
        for (int i = 0; i < work->high; i++) {
            const float *at = image + i * line;
            float *to = y + (int64_t)i * work->broad * filters + f;
            int j = 0;
#define WINDOWS(pixels, vectors)                                                                              \
    for (; j + (pixels) <= work->broad; j += (pixels))                                                        \
    window(pixels, vectors, at + j * channels, channels, line, rows, segment, w + f, b + f, filters, to + j * filters)
            if (vectors == 2) {
                WINDOWS(6, 2);
                WINDOWS(4, 2);
                WINDOWS(2, 2);
                WINDOWS(1, 2);
            } else {
                WINDOWS(12, 1);
                WINDOWS(8, 1);
                WINDOWS(4, 1);
                WINDOWS(1, 1);
            }
        }
        f += vectors * LANES;
    }
}

INLINE vector pick(whole mask, vector yes, vector no) {
    return (vector)(((whole)yes & mask) | ((whole)no & ~mask));
}

/* The largest of each two by two, cut at zero where the layer is rectified; `places` says which it was. */
static void pool(const Layer *layer, const Work *work, const float *from, float *to, int32_t *places) {
    const int64_t filters = layer->outputs, line = work->broad * filters;
    const vector zero = {0};
    for (int i = 0; i + 2 <= work->high; i += 2)
        for (int j = 0; j + 2 <= work->broad; j += 2, to += filters, places += filters) {
            const float *at = from + i * line + j * filters;
            for (int64_t f = 0; f < filters; f += LANES) {
                const vector a = load(at + f), b = load(at + filters + f);
                const vector c = load(at + line + f), d = load(at + line + filters + f);
                const whole above = b > a, below = d > c;
                const vector first = pick(above, b, a), second = pick(below, d, c);
                const whole lower = second > first;
                const vector largest = pick(lower, second, first);
                store(to + f, layer->rectified ? pick(largest < zero, zero, largest) : largest);
                *(whole *)(places + f) = (lower & (2 - below)) | (~lower & -above);
            }
        }
}

static void convolution_forward(const Layer *layer, const Work *work, const float *w, const float *b, const float *x,
                                float *y, int32_t *places, int64_t count) {
    const int64_t size = (int64_t)layer->height * layer->width * layer->inputs;
    for (int64_t m = 0; m < count; m++) {
        float *own = y + m * work->pooled;
        convolve(layer, work, w, b, x + m * size, layer->pooled ? work->unpooled : own);
        if (layer->pooled) {
            pool(layer, work, work->unpooled, own, places + m * work->pooled);
        } else if (layer->rectified) {
            for (int64_t k = 0; k < work->size; k++) own[k] = own[k] < 0 ? 0 : own[k];
        }
    }
}

/* ROWS x VECTORS of a filter's gradient, kept in registers over all its entries. Rows are taken in whole vectors: what
 * lies behind a window goes to the gradient's padding (buffers have SLACK). */
INLINE void gather(const int rows, const int vectors, const Entry *entries, int64_t count, const float *x, int64_t line,
                   float *gradient, int64_t stride) {
    vector sums[5][10];
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

static void filter_gradient(const Entry *entries, int64_t count, const float *x, int rows, int64_t line, float *gradient,
                            int64_t stride) {
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

static void convolution_backward(const Layer *layer, const Work *work, const Plan *plan, float *w, float *b,
                                 const float *x, const float *error, const int32_t *places, float *below,
                                 int64_t count) {
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
            for (int64_t f = 0; f < filters; f++) {
                float *weight = w + (row * segment + k) * filters + f;
                *weight = plan->kept * *weight - plan->rate * work->gradient[(f * rows + row) * stride + k];
            }
    for (int64_t f = 0; layer->biased && f < filters; f++) b[f] = plan->kept * b[f] - plan->rate * bias[f];
}

/* ---- the chain ---- */

static int64_t input_size(const Layer *layer) {
    return layer->convolution ? (int64_t)layer->height * layer->width * layer->inputs : layer->inputs;
}

static void forward(const Layer *layers, const Work *work, int first, int last, float *const *weights,
                    float *const *biases, const float *x, int64_t count) {
    for (int l = first; l < last; l++) {
        if (layers[l].convolution)
            convolution_forward(layers + l, work + l, weights[l], biases[l], x, work[l].outputs, work[l].places, count);
        else
            linear_forward(layers + l, weights[l], biases[l], x, work[l].outputs, count);
        x = work[l].outputs;
    }
}

/* (softmax(z) - y) / n in place of z; gives the mean loss. */
static double loss_and_error(float *z, const int64_t *labels, const int64_t *order, int64_t count, int classes,
                             int64_t stride) {
    double sum = 0;
    for (int64_t m = 0; m < count; m++) {
        float *own = z + m * stride, largest = own[0], shares = 0;
        const int64_t label = labels[order[m]];
        for (int c = 1; c < classes; c++) largest = own[c] > largest ? own[c] : largest;
        for (int c = 0; c < classes; c++) shares += expf(own[c] - largest);
        sum += (double)(logf(shares) - (own[label] - largest));
        for (int c = 0; c < classes; c++)
            own[c] = (expf(own[c] - largest) / shares - (c == label ? 1.0f : 0.0f)) / (float)count;
        for (int64_t c = classes; c < stride; c++) own[c] = 0;
    }
    return sum / (double)count;
}

static Work *prepare(const Layer *layers, int count, int64_t batch, int frozen) {
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
            own->unpooled = malloc(sizeof(float) * own->size);
            own->places = calloc((size_t)(batch * own->pooled), sizeof(int32_t));
            if (l >= frozen) {
                own->gradient = malloc(sizeof(float) * (filters + layer->outputs));
                own->turned = calloc((size_t)filters, sizeof(float));
                own->entries = malloc(sizeof(Entry) * (own->pooled + layer->outputs));
                own->counts = malloc(sizeof(int64_t) * layer->outputs);
            }
        }
        own->outputs = calloc((size_t)(batch * own->pooled + SLACK), sizeof(float));
        /* The error at this layer's input; none goes below the first trained layer. */
        if (l > frozen) own->errors = calloc((size_t)(batch * input_size(layer) + SLACK), sizeof(float));
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
        if (layers[l].convolution && (!own->unpooled || !own->places)) return 0;
        if (layers[l].convolution && l >= frozen && (!own->gradient || !own->turned || !own->entries || !own->counts))
            return 0;
    }
    return work != NULL;
}

static void backward(const Layer *layers, const Work *work, const Plan *plan, float *const *weights,
                     float *const *biases, const float *x, int64_t count) {
    float *error = work[plan->layers - 1].outputs; /* the last layer's outputs were turned into their error */
    for (int l = plan->layers - 1; l >= plan->frozen; l--) {
        const Layer *layer = layers + l;
        const int wanted = l > plan->frozen;
        const float *inputs = wanted ? work[l - 1].outputs : x;
        float *below = wanted ? work[l].errors : NULL;
        if (layer->convolution)
            convolution_backward(layer, work + l, plan, weights[l], biases[l], inputs, error, work[l].places, below, count);
        else
            linear_backward(layer, plan, weights[l], biases[l], inputs, error, below, count);
        if (wanted && layers[l - 1].rectified) {
            const int64_t size = count * work[l - 1].pooled;
            for (int64_t k = 0; k < size; k++) below[k] = inputs[k] > 0 ? below[k] : 0;
        }
        error = below;
    }
}

/* The local round of one device; weights and biases are changed in place. The mean loss over its steps, negative where
 * there is no memory. `order` holds the samples of every epoch. */
double fedpmt_train(const Plan *plan, const Layer *layers, float *const *weights, float *const *biases,
                    const float *inputs, const int64_t *labels, const int64_t *order) {
    const int count = plan->layers, frozen = plan->frozen;
    const int64_t batch = plan->batch < plan->samples ? plan->batch : plan->samples;
    const int first = plan->cached ? frozen : 0;
    const int64_t size = input_size(layers), hidden = input_size(layers + first);
    Work *work = prepare(layers, count, batch, frozen);
    float *cache = plan->cached && frozen ? malloc(sizeof(float) * plan->samples * hidden) : NULL;
    float *gathered = calloc((size_t)(batch * hidden + SLACK), sizeof(float));
    double sum = -1;
    int64_t steps = 0;
    if (!complete(layers, work, count, frozen) || !gathered || (plan->cached && frozen && !cache)) goto done;
    sum = 0;
    for (int64_t m = 0; cache && m < plan->samples; m += batch) {
        const int64_t some = m + batch <= plan->samples ? batch : plan->samples - m;
        forward(layers, work, 0, frozen, weights, biases, inputs + m * size, some);
        memcpy(cache + m * hidden, work[frozen - 1].outputs, sizeof(float) * some * hidden);
    }
    const float *source = cache ? cache : inputs;
    for (int64_t epoch = 0; epoch < plan->epochs; epoch++, order += plan->samples)
        for (int64_t m = 0; m < plan->samples; m += batch) {
            if (steps == plan->limit) goto done;
            const int64_t some = m + batch <= plan->samples ? batch : plan->samples - m;
            for (int64_t s = 0; s < some; s++)
                memcpy(gathered + s * hidden, source + order[m + s] * hidden, sizeof(float) * hidden);
            forward(layers, work, first, count, weights, biases, gathered, some);
            sum += loss_and_error(work[count - 1].outputs, labels, order + m, some, plan->classes,
                                  layers[count - 1].outputs);
            const float *below = frozen > first ? work[frozen - 1].outputs : gathered;
            backward(layers, work, plan, weights, biases, below, some);
            steps++;
        }
done:
    release(work, count);
    free(cache);
    free(gathered);
    return steps ? sum / (double)steps : sum;
}

/* The outputs of some samples, `block` of them at a time; 0 where there is no memory. */
int32_t fedpmt_forward(const Layer *layers, int32_t count, float *const *weights, float *const *biases,
                       const float *inputs, int64_t samples, int64_t block, float *outputs) {
    const int64_t size = input_size(layers), stride = layers[count - 1].outputs;
    Work *work = prepare(layers, count, block, count);
    const int fine = complete(layers, work, count, count);
    for (int64_t m = 0; fine && m < samples; m += block) {
        const int64_t some = m + block <= samples ? block : samples - m;
        forward(layers, work, 0, count, weights, biases, inputs + m * size, some);
        memcpy(outputs + m * stride, work[count - 1].outputs, sizeof(float) * some * stride);
    }
    release(work, count);
    return fine;
}
