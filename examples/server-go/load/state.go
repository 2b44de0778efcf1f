package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// state is what a server holds.
//
// tasks are goroutines, or the connections of a server without goroutines.
type state struct{ running, waiting, blocks, tasks, descriptors float64 }

// state reads the metrics.
func (s *server) state() (now state, err error) {
	response, err := s.request(context.Background(), http.MethodGet, "/metrics", nil)
	if err != nil {
		return now, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return now, err
	}
	sums := map[string]*float64{
		"pagedllm_num_requests_running": &now.running,
		"pagedllm_num_requests_waiting": &now.waiting,
		"pagedllm_kv_cache_usage_perc":  &now.blocks,
		"go_goroutines":                 &now.tasks,
		"pagedllm_http_connections":     &now.tasks,
		"process_open_fds":              &now.descriptors,
	}
	for _, line := range strings.Split(string(text), "\n") {
		name, value, _ := strings.Cut(line, " ")
		name, _, _ = strings.Cut(name, "{")
		if sum := sums[name]; sum != nil {
			number, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return now, err
			}
			*sum += number
		}
	}
	if now.tasks == 0 {
		return now, errors.New("the server has neither the metric go_goroutines nor pagedllm_http_connections")
	}
	return now, nil
}

func (s *server) waitUntilIdle() error {
	_, err := s.idleState()
	return err
}

// idleState waits until no request is left, and returns the state then.
func (s *server) idleState() (state, error) {
	return s.waitFor("requests are left", func(now state) bool {
		return now.running == 0 && now.waiting == 0 && now.blocks == 0
	})
}

// waitForState waits until the server holds no more than before the load. A few goroutines and
// descriptors come and go with connections and timers.
func (s *server) waitForState(before state) error {
	s.client.CloseIdleConnections()
	after, err := s.waitFor("something is left behind", func(now state) bool {
		return now.running == 0 && now.blocks == 0 && now.tasks <= before.tasks+4 &&
			now.descriptors <= before.descriptors+4
	})
	if err == nil {
		fmt.Printf("load: nothing is left behind: %.0f goroutines or connections (%.0f before), %.0f descriptors "+
			"(%.0f before)\n",
			after.tasks, before.tasks, after.descriptors, before.descriptors)
	}
	return err
}

func (s *server) waitFor(problem string, condition func(state) bool) (now state, err error) {
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if now, err = s.state(); err != nil || condition(now) {
			return now, err
		}
		if time.Now().After(end) {
			return now, fmt.Errorf("%s after a minute: %+v", problem, now)
		}
	}
}

// hostCPU returns the CPU time of a process without the threads of the library, whose names begin
// with "pagedllm-". 0 for no process.
func hostCPU(process int) (time.Duration, error) {
	if process == 0 {
		return 0, nil
	}
	folder := filepath.Join("/proc", strconv.Itoa(process))
	all, err := ticks(filepath.Join(folder, "stat"))
	if err != nil {
		return 0, err
	}
	tasks, err := filepath.Glob(filepath.Join(folder, "task", "*"))
	if err != nil {
		return 0, err
	}
	for _, task := range tasks {
		name, err := os.ReadFile(filepath.Join(task, "comm"))
		if err != nil || !strings.HasPrefix(string(name), "pagedllm-") {
			continue // the thread has ended, or is one of the host
		}
		if own, err := ticks(filepath.Join(task, "stat")); err == nil {
			all -= own
		}
	}
	return all, nil
}

// ticks returns the CPU time in a stat file of /proc, whose unit is 10 ms.
func ticks(path string) (time.Duration, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	// The name of the process, in parentheses, can contain spaces.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("%s: %q has no CPU times", path, text)
	}
	user, err := strconv.Atoi(fields[11])
	if err != nil {
		return 0, err
	}
	system, err := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond, err
}
