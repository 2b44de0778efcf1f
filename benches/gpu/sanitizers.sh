#!/usr/bin/env bash
# usage: sanitizers.sh
# The tools of compute-sanitizer on tests of the kernels, side by side on one GPU. SCRIPT.log contains their reports.
. "$(dirname "$0")/common.sh"

# Slow tools run the faster tests of most families of kernels.
SOME=(attention_on_tensor_cores attention_over_latents embeddings_equal strips_and_selected_rows copied_and_swapped_blocks products_in_fp8
    products_with_integers gated_mlps norms_equal placeholders_are_replaced other_batches_are_padded sampling_equals_the_sampler_of_the_host)

sanitized() { # TOOL SECONDS PROGRAM [TESTS]
    local name=$1-$3
    if command -v compute-sanitizer >/dev/null; then
        part "$name" "$2" compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 9 "$built/$3" --test-threads=1 "${@:4}"
    else
        report "$name" skipped "this machine has no compute-sanitizer"
    fi
}

sanitized memcheck 520 cuda &
sanitized memcheck 520 cuda_blocks &
sanitized racecheck 520 cuda "${SOME[@]}" &
sanitized initcheck 520 cuda "${SOME[@]}" &
sanitized synccheck 520 cuda "${SOME[@]}" &
wait
finish
