/* Products that keep a block of sums or of weights in registers, for vectors of WIDTH numbers; native.c includes this
 * file once for each width. Every sum takes its terms in the same order, so that the bits do not depend on the width.
 */
#define JOINED(name, width) name##_##width
#define OF_WIDTH(name, width) JOINED(name, width)
#define OF(name) OF_WIDTH(name, WIDTH)

typedef float OF(vector) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

INLINE OF(vector) OF(load)(const float *from) { return *(const OF(vector) *)from; }
INLINE void OF(store)(float *to, OF(vector) value) { *(OF(vector) *)to = value; }

/* ---- linear layers ---- */

/* With momentum: what the gradient is added to, m v + decay w + shift. Its sums begin with it, so that a step has no
 * operation more than without. */
INLINE OF(vector) OF(begin)(const Step step, const int fresh, const float *w, const float *velocity, const float *shift) {
    OF(vector) sum = {0};
    if (!fresh) sum = step.momentum * OF(load)(velocity);
    if (step.decay != 0) sum += step.decay * OF(load)(w);
    if (shift) sum += step.shifted * OF(load)(shift);
    return sum;
}

/* The weights after the step of a new velocity, which takes the place of the old one. */
INLINE OF(vector) OF(moved)(const Step step, const int fresh, const float *w, float *velocity, OF(vector) speed) {
    OF(vector) way = speed;
    /* d + m v, where d = v - m v_old */
    if (step.nesterov) way += step.momentum * speed;
    if (step.nesterov && !fresh) way -= step.momentum * OF(load)(velocity);
    OF(store)(velocity, speed);
    return OF(load)(w) - step.rate * way;
}

/* y[m] += x[m] w for a block of the weights. */
INLINE void OF(lift)(const int vectors, OF(vector) w[ROWS][VECTORS], Batch of, int64_t inputs, int64_t outputs) {
    for (int64_t m = 0; m < of.count; m++, of.x += inputs, of.y += outputs) {
        OF(vector) sums[VECTORS];
        for (int v = 0; v < vectors; v++) sums[v] = OF(load)(of.y + v * WIDTH);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < vectors; v++) sums[v] += of.x[r] * w[r][v];
        for (int v = 0; v < vectors; v++) OF(store)(of.y + v * WIDTH, sums[v]);
    }
}

INLINE void OF(block_forward)(const int vectors, const float *w, Batch of, int64_t inputs, int64_t outputs) {
    OF(vector) block[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) block[r][v] = OF(load)(w + r * outputs + v * WIDTH);
    OF(lift)(vectors, block, of, inputs, outputs);
}

/* A block takes its step; while it is in registers, the next batch goes through it. */
INLINE void OF(block_step)(const int vectors, const int moving, const int fresh, const Step step, float *w,
                           float *velocity, const float *shift, const float *x, const float *error, int64_t count,
                           Batch next, int64_t inputs, int64_t outputs) {
    OF(vector) block[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) {
            const int64_t at = r * outputs + v * WIDTH;
            block[r][v] = (OF(vector)){0};
            if (moving) block[r][v] = OF(begin)(step, fresh, w + at, velocity + at, shift ? shift + at : NULL);
        }
    for (int64_t m = 0; m < count; m++, x += inputs, error += outputs) {
        OF(vector) errors[VECTORS];
        for (int v = 0; v < vectors; v++) {
            errors[v] = OF(load)(error + v * WIDTH);
            HOLD(errors[v]);
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < vectors; v++) block[r][v] += x[r] * errors[v];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) {
            const int64_t at = r * outputs + v * WIDTH;
            if (moving) {
                block[r][v] = OF(moved)(step, fresh, w + at, velocity + at, block[r][v]);
            } else {
                block[r][v] = step.kept * OF(load)(w + at) - step.rate * block[r][v];
                if (shift) block[r][v] -= OF(load)(shift + at);
            }
            OF(store)(w + at, block[r][v]);
        }
    OF(lift)(vectors, block, next, inputs, outputs);
}

/* ---- convolutions ---- */

/* PIXELS neighbours in a row, vectors x WIDTH filters of each. */
INLINE void OF(window)(const int pixels, const int vectors, const float *image, int64_t channels, int64_t line, int rows,
                       int64_t segment, const float *w, const float *b, int64_t filters, float *y) {
    OF(vector) sums[PIXELS][2];
    for (int p = 0; p < pixels; p++)
        for (int v = 0; v < vectors; v++) sums[p][v] = OF(load)(b + v * WIDTH);
    for (int row = 0; row < rows; row++) {
        const float *at = image + row * line;
        for (int64_t k = 0; k < segment; k++, w += filters) {
            OF(vector) weights[2];
            for (int v = 0; v < vectors; v++) {
                weights[v] = OF(load)(w + v * WIDTH);
                HOLD(weights[v]);
            }
            for (int p = 0; p < pixels; p++)
                for (int v = 0; v < vectors; v++) sums[p][v] += at[p * channels + k] * weights[v];
        }
    }
    for (int p = 0; p < pixels; p++)
        for (int v = 0; v < vectors; v++) OF(store)(y + p * filters + v * WIDTH, sums[p][v]);
}

#undef JOINED
#undef OF_WIDTH
#undef OF
#undef WIDTH
