package pagedllm

import "cmp"

// A RequestID is the id of a request of one engine. Ids are never reused.
type RequestID uint64

// results returns the number of results.
func (r *Request) results() int { return cmp.Or(r.N, 1) }
