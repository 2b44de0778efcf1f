package server

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

func TestThePageHasStrictHeaders(t *testing.T) {
	options := limits()
	options.Keys = Keys{sha256.Sum256([]byte("secret"))}
	server := start(t, options, open(t, pagedllm.Options{}))
	response, body := get(t, server.URL+"/") // without a key
	if response.StatusCode != 200 || body != string(page) {
		t.Fatalf("status %d: %.200s", response.StatusCode, body)
	}
	for name, want := range map[string]string{"Content-Type": "text/html; charset=utf-8",
		"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cache-Control": "no-cache",
		"Referrer-Policy": "no-referrer", "Cross-Origin-Opener-Policy": "same-origin"} {
		if response.Header.Get(name) != want {
			t.Errorf("%s: %q, want %q", name, response.Header.Get(name), want)
		}
	}
	policy := "default-src 'none'; style-src '" + inlineHash(t, "style") + "'; script-src '" +
		inlineHash(t, "script") + "'; connect-src 'self'; img-src data:; base-uri 'none'; " +
		"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; " +
		"trusted-types 'none'"
	if got := response.Header.Get("Content-Security-Policy"); got != policy {
		t.Errorf("%q, want %q", got, policy)
	}
	if len(page) > 64<<10 {
		t.Errorf("the page has %d bytes", len(page))
	}
}

// inlineHash returns the hash by which a policy allows the only element of a name.
func inlineHash(t *testing.T, name string) string {
	t.Helper()
	_, rest, _ := strings.Cut(string(page), "<"+name+">")
	text, _, found := strings.Cut(rest, "</"+name+">")
	if !found || strings.Count(string(page), "<"+name) != 1 {
		t.Fatalf("the page needs one element %s without attributes", name)
	}
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

func TestThePageRefersToNoOtherFile(t *testing.T) {
	urls := regexp.MustCompile(`(?i)(?:src|href|action)=|url\(|@import|\bimport\b|https?://`)
	for _, place := range urls.FindAllIndex(page, -1) {
		text := string(page[place[0]:min(len(page), place[1]+40)])
		if !strings.HasPrefix(text, `href="data:`) &&
			!strings.HasPrefix(text, "http://www.w3.org/2000/svg") { // the name of a namespace
			t.Errorf("%q", text)
		}
	}
}

func TestBrowsersKeepThePageUntilItChanges(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	response, _ := get(t, server.URL+"/")
	tag := response.Header.Get("ETag")
	response, body := get(t, server.URL+"/", "If-None-Match", tag)
	if response.StatusCode != http.StatusNotModified || len(body) > 0 || tag == "" {
		t.Errorf("status %d, tag %q: %.200s", response.StatusCode, tag, body)
	}
	response, _ = get(t, server.URL+"/", "If-None-Match", `"other"`)
	if response.StatusCode != 200 {
		t.Errorf("status %d", response.StatusCode)
	}
}

func TestPathsAndMethodsBesideThePageAreRefused(t *testing.T) {
	server := start(t, limits(), open(t, pagedllm.Options{}))
	for _, path := range []string{"/index.html", "/page.html", "/favicon.ico", "/engine"} {
		response, body := get(t, server.URL+path)
		if response.StatusCode != 404 || !json.Valid([]byte(body)) {
			t.Errorf("%s: status %d: %.200s", path, response.StatusCode, body)
		}
	}
	for _, path := range []string{"/", "/engine/snapshot"} {
		ask(t, server, path, `{}`, 405)
	}
}

func TestSnapshotsNeedAKeyAndAModel(t *testing.T) {
	options := limits()
	options.Keys = Keys{sha256.Sum256([]byte("secret"))}
	other := open(t, pagedllm.Options{})
	other.Name = "other"
	two := start(t, options, open(t, pagedllm.Options{}), other)
	one := start(t, options, open(t, pagedllm.Options{}))
	for _, test := range []struct {
		url    string
		key    string
		status int
		code   string
	}{
		{two.URL + "/engine/snapshot?model=other", "", 401, "missing_api_key"},
		{two.URL + "/engine/snapshot?model=other", "wrong", 401, "invalid_api_key"},
		{two.URL + "/engine/snapshot?model=other", "secret", 200, ""},
		{two.URL + "/engine/snapshot?model=none", "secret", 404, "model_not_found"},
		{two.URL + "/engine/snapshot", "secret", 404, "model_not_found"},
		{one.URL + "/engine/snapshot", "secret", 200, ""},
	} {
		response, body := get(t, test.url, "X-Api-Key", test.key)
		if response.StatusCode != test.status {
			t.Errorf("%+v: status %d: %.200s", test, response.StatusCode, body)
			continue
		}
		if test.status == 200 {
			checkSnapshot(t, response, []byte(body))
			continue
		}
		var refused errorBody
		if err := json.Unmarshal([]byte(body), &refused); err != nil || refused.Error.Code == nil ||
			*refused.Error.Code != test.code {
			t.Errorf("%+v: %s", test, body)
		}
	}
}

func TestSnapshotsHaveALimitedSize(t *testing.T) {
	// The memory of blocks that no sequence uses is not touched.
	engine, err := pagedllm.Open(context.Background(),
		pagedllm.Options{ModelPath: "../../../model", Threads: 1, KVBytes: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { engine.Close() })
	server := start(t, limits(), Model{Name: "tiny", Engine: engine})
	_, body := get(t, server.URL+"/engine/snapshot")
	var snapshot any
	if err := json.Unmarshal([]byte(body), &snapshot); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	shown, all := 0.0, at(t, snapshot, "pool", "blocks").(float64)
	for _, run := range at(t, snapshot, "pool", "runs").([]any) {
		shown += at(t, run, 0).(float64)
	}
	if shown != maxSnapshotBlocks || all <= shown || at(t, snapshot, "pool", "free") != all {
		t.Errorf("%v of %v blocks: %s", shown, all, body)
	}
}

// checkSnapshot checks the snapshot of an engine without requests.
func checkSnapshot(t *testing.T, response *http.Response, body []byte) {
	t.Helper()
	if response.Header.Get("Content-Type") != "application/json" ||
		response.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("%v", response.Header)
	}
	var snapshot any
	if err := json.Unmarshal(body, &snapshot); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	blocks := at(t, snapshot, "pool", "blocks").(float64)
	if at(t, snapshot, "pool", "runs", 0, 0) != blocks ||
		at(t, snapshot, "pool", "runs", 0, 1) != "free" ||
		at(t, snapshot, "counts", "running") != 0.0 ||
		len(at(t, snapshot, "sequences").([]any)) != 0 {
		t.Errorf("%s", body)
	}
}
