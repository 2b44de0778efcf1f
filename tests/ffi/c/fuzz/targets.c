// Choice of the engine, queue, sequence or budget of a call.
#include "program.h"

engine_slot *any_engine(worker *w) {
    static engine_slot none;  // stays empty: its engine is NULL
    unsigned i = below(w, 32);
    if (i == 31) return &none;
    for (unsigned tries = 0; tries < ENGINES; tries++)
        if (program.engines[(i + tries) % ENGINES].engine)
            return &program.engines[(i + tries) % ENGINES];
    return &none;
}

engine_slot *any_text_engine(worker *w) {
    for (int i = 0; i < ENGINES && !one_in(w, 8); i++)
        if (program.engines[i].engine && program.engines[i].has_text) return &program.engines[i];
    return any_engine(w);
}

queue_slot *queues_of_racer(unsigned index) {
    return &program.queues[SHARED_QUEUES + (index - 1) * QUEUES_OF_RACER];
}

// A queue that this worker may use, or an empty slot.
static queue_slot *any_queue(worker *w) {
    static queue_slot none;
    unsigned i = below(w, 64);
    if (i == 63) return &none;
    if (i >= 40) return &any_engine(w)->own;
    if (w->index == 0) return &program.queues[i % QUEUES];
    i %= SHARED_QUEUES + QUEUES_OF_RACER;
    return i < SHARED_QUEUES ? &program.queues[i] : &queues_of_racer(w->index)[i - SHARED_QUEUES];
}

queue_slot *any_live_queue(worker *w) {
    for (int tries = 0; tries < 4; tries++) {
        queue_slot *q = any_queue(w);
        if (q->queue) return q;
    }
    return &any_engine(w)->own;
}

engine_slot *engine_numbered(unsigned number) {
    for (int i = 0; i < ENGINES; i++)
        if (program.engines[i].engine && program.engines[i].number == number)
            return &program.engines[i];
    return NULL;
}
