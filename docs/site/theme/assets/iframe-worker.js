/* Search without a server. Browsers give no worker to a page that is opened from a disk; there, and only there, a
   hidden frame of the same page stands in for one: it has a global scope of its own, and takes and sends messages. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.running = new Promise(done => { this.frame.onload = done }).then(() => this.start(url))
      document.body.append(this.frame)
    }

    start(url) {
      const scope = this.frame.contentWindow
      scope.postMessage = data => this.tell(new MessageEvent("message", { data }))
      scope.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve())
      return this.load(url)
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script")
        Object.assign(script, { src: url, onload: done, onerror: failed })
        this.frame.contentDocument.body.append(script)
      })
    }

    tell(event) {
      this.dispatchEvent(event)
      this[`on${event.type}`]?.(event)
    }

    postMessage(data) {
      this.running.then(
        () => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })),
        () => this.tell(new ErrorEvent("error")),
      )
    }

    terminate() {
      this.frame.remove()
    }
  }
}
