#!/usr/bin/env bash
# usage: works.sh
# Does the CUDA backend work on this GPU: instructions, kernels, engines, bits of repeated runs, and model families.
. "$(dirname "$0")/common.sh"

# Tests of injected faults need tests/cuda and are left out.
ON_DEVICE=(models_have_the_outputs_of_the_cpu a_repeated_run_has_the_same_bits swapped_sequences_continue_with_the_same_bits
    a_batch_invariant_sequence_has_the_same_bits_in_any_batch fp8_weights_equal_rounded_weights_on_the_cpu
    every_kv_dtype_has_outputs_close_to_the_cpu device_and_host_sample_the_same_tokens
    steps_in_flight_do_not_change_outputs a_step_in_flight_can_add_a_part_of_attention
    an_imported_sequence_does_not_take_a_result_in_flight integer_weights_equal_their_numbers_on_the_cpu)

part machine 20 nvidia-smi
ours probe 20
part kernels 120 "$built/cuda" --test-threads=8
part block_kernels 40 "$built/cuda_blocks" --test-threads=8
part engine_tests 80 "$built/cuda_engine" --test-threads=2 "${ON_DEVICE[@]}"
ours determinism 80
peer models 180 torch,transformers models.py
finish
