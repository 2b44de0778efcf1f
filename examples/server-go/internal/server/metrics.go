package server

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// counters count the requests by endpoint and status.
type counters struct {
	mu       sync.Mutex
	requests map[endpointStatus]int
}

type endpointStatus struct {
	path   string
	status int
}

func (c *counters) add(path string, status int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.requests == nil {
		c.requests = make(map[endpointStatus]int)
	}
	c.requests[endpointStatus{path, status}]++
}

// text returns the counters in the OpenMetrics text format.
func (c *counters) text(inProgress int) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var text strings.Builder
	text.WriteString("# HELP pagedllm_http_requests HTTP requests by endpoint and status.\n" +
		"# TYPE pagedllm_http_requests counter\n")
	byName := func(a, b endpointStatus) int {
		return cmp.Or(cmp.Compare(a.path, b.path), cmp.Compare(a.status, b.status))
	}
	for _, key := range slices.SortedFunc(maps.Keys(c.requests), byName) {
		fmt.Fprintf(&text, "pagedllm_http_requests_total{path=%q,status=\"%d\"} %d\n", key.path,
			key.status, c.requests[key])
	}
	fmt.Fprintf(&text, "# HELP pagedllm_http_requests_in_progress Requests in progress that use "+
		"an engine.\n# TYPE pagedllm_http_requests_in_progress gauge\n"+
		"pagedllm_http_requests_in_progress %d\n", inProgress)
	fmt.Fprintf(&text, "# HELP go_goroutines Goroutines of the process.\n"+
		"# TYPE go_goroutines gauge\ngo_goroutines %d\n", runtime.NumGoroutine())
	if descriptors, err := os.ReadDir("/proc/self/fd"); err == nil {
		fmt.Fprintf(&text, "# HELP process_open_fds File descriptors of the process.\n"+
			"# TYPE process_open_fds gauge\nprocess_open_fds %d\n", len(descriptors))
	}
	return text.String()
}

func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) error {
	texts := []string{s.counters.text(len(s.slots))}
	for _, model := range s.models {
		text, err := model.Engine.Metrics()
		if err != nil {
			return err
		}
		texts = append(texts, text)
	}
	w.Header().Set("Content-Type", "application/openmetrics-text; version=1.0.0; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	_, err := w.Write([]byte(mergeMetrics(texts)))
	return err
}

// mergeMetrics merges the metrics of several engines, which the label model_name distinguishes.
// OpenMetrics wants each family once, with all of its samples, and one end of the text.
func mergeMetrics(texts []string) string {
	var names []string
	heads, samples := make(map[string]string), make(map[string]string)
	for _, text := range texts {
		family, known := "", false
		for _, line := range strings.SplitAfter(text, "\n") {
			switch fields := strings.Fields(line); {
			case len(fields) == 0 || line == "# EOF\n" || line == "# EOF":
			case fields[0] == "#" && len(fields) > 2:
				if fields[2] != family {
					family = fields[2]
					if _, known = heads[family]; !known {
						names = append(names, family)
					}
				}
				if !known {
					heads[family] += line
				}
			default:
				samples[family] += line
			}
		}
	}
	var merged strings.Builder
	for _, name := range names {
		merged.WriteString(heads[name] + samples[name])
	}
	return merged.String() + "# EOF\n"
}
